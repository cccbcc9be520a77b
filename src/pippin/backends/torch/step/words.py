"""What a step over kernels reads, as one array of words: sent in one copy, read as four tables.

    by row     rows that decode: slot | position | cell | states | noise | how it samples
               where drafts are verified, behind that: exact | least position | depth | kept drafts
               | length of the prompt | whether the drafts are the device's own | whether the
               sampler draws; stop ids; cells from the least position on; what is proposed there
    by token   of prompts' chunks: token | position | cell | places of its convolution's inputs
    by block   slot | position | first token | tokens | the row's first token | state in | slab
    by chunk   last token | first block | blocks, and what a decode row has: the slot that the next
               token goes to, where the row's state is read, how it samples

A block is GRID tokens of one row, or what is left of them; a slab is where the state after it goes,
0: nowhere. Sizes are few, so that there are few graphs. What a graph has room for and a step does
not fill is padding, which reads zeros and writes waste: rows of slot 0, tokens of no block, blocks
without tokens, chunks without blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from pippin.backends.base import MAX_STOP_IDS, PrefillRow
from pippin.backends.chunking import cut_chunk
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.pools.rows import Rows
from pippin.backends.torch.step.batches import NO_TOKEN, TakenChunks, TakenRows, conv_places
from pippin.backends.torch.step.decode_inputs import FIELDS, NO_ROWS, Choice, Inputs, pack_inputs
from pippin.backends.torch.step.slots import Slots
from pippin.types import GRID

VERIFY_FIELDS = ("exact", "least", "depth", "num_kept", "prompt_len", "is_drafted", "is_left")
FIRST_STOP = len(FIELDS) + len(VERIFY_FIELDS)
FIRST_CELL = FIRST_STOP + MAX_STOP_IDS
TOKEN_FIELDS = ("token", "position", "cell")  # and the places
CHUNK_FIELDS = ("last", "first_block", "num_blocks")

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ROOM_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
ROOM_CHUNKS = (4, 16)
MOST_TOKENS = ROOM_TOKENS[-1]  # of chunks in one captured step,
MOST_VERIFIED = 256  # and of rows with drafts: more rows are several steps
MIXED_WIDTHS = (16, 32, 64, 128, 256)
MIXED_TOKENS = (64, 128, 256, 512, 1024)  # of more a forward of their own costs little more


class StepSize(NamedTuple):
    """What a step has room for: rows that decode, or verify drafts, and chunks behind them."""

    num_rows: int = 0
    depth: int = 0  # drafts of a row
    # Cells of a row that a step may write, and tokens that may be proposed: each. 0: the rows'
    # lengths are known, and nothing is verified.
    span: int = 0
    num_drafts: int = 0  # that a row leaves for its next step
    num_tokens: int = 0  # of chunks
    num_chunks: int = 0

    @property
    def width(self) -> int:
        """Tokens of a row."""
        return 1 + self.depth

    @property
    def num_placed(self) -> int:
        """Tokens of rows."""
        return self.num_rows * self.width

    @property
    def num_fields(self) -> int:
        return FIRST_CELL + 2 * self.span if self.span else len(FIELDS)

    @property
    def num_blocks(self) -> int:
        """Of GRID tokens or less, each of one chunk: as many as there can be, in fours.

        So every line of a graph's inputs begins where kernels load best.
        """
        return _in_fours((self.num_tokens + (GRID - 1) * self.num_chunks) // GRID)

    @property
    def least_chunks(self) -> int:
        """That do not fit into a smaller one."""
        return 1 + max((most for most in ROOM_CHUNKS if most < self.num_chunks), default=0)

    @property
    def kind(self) -> str:
        if self.span:
            return "steps with drafts"
        if not self.num_tokens:
            return "decode steps"
        return "decode rows beside chunks" if self.num_rows else "chunks of prompts"

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Mixed steps leave nothing to the sampler, and greedy rows may take noise of zero."""
        both = self.num_rows and self.num_tokens
        return (Choice.DRAWN, Choice.TOP_P) if both else tuple(Choice)


def _in_fours(number: int) -> int:
    return -(-number // 4) * 4


def width_for(num_rows: int) -> int:
    return next((width for width in WIDTHS if width >= num_rows), -(-num_rows // 64) * 64)


def span_for(max_depth: int) -> int:
    """Where one step with drafts is in flight at most."""
    return 2 * max_depth + 1


def room(num_tokens: int, num_chunks: int) -> StepSize:
    return StepSize(num_tokens=num_tokens, num_chunks=num_chunks)


def launched(num_tokens: int, num_chunks: int) -> StepSize:
    """Of chunks that are not captured."""
    return room(_in_fours(num_tokens), _in_fours(num_chunks))


ROOMS = tuple(room(tokens, chunks) for chunks in ROOM_CHUNKS for tokens in ROOM_TOKENS)
MIXED_ROOMS = tuple(room(tokens, ROOM_CHUNKS[-1]) for tokens in MIXED_TOKENS)


def room_for(
    num_tokens: int, num_chunks: int, rooms: Sequence[StepSize] = ROOMS
) -> StepSize | None:
    """The smallest one; None: there is none."""
    fits = (r for r in rooms if r.num_tokens >= num_tokens and r.num_chunks >= num_chunks)
    return next(fits, None)


def mixed_size_for(num_rows: int, num_tokens: int, num_chunks: int) -> StepSize | None:
    """The smallest one; None: there is none."""
    width = next((width for width in MIXED_WIDTHS if width >= num_rows), None)
    found = room_for(num_tokens, num_chunks, MIXED_ROOMS)
    return None if width is None or found is None else found._replace(num_rows=width)


def group_by_room(chunks: Sequence[PrefillRow]) -> list[list[PrefillRow]]:
    """Chunks that share a forward: as many as a room takes. What none takes is cut."""
    groups: list[list[PrefillRow]] = []
    num_tokens = 0  # of the last group
    for chunk in chunks:
        for part in cut_chunk(chunk, range(chunk.start + MOST_TOKENS, chunk.end, MOST_TOKENS)):
            length, follows = len(part.tokens), part.start > chunk.start
            full = not groups or room_for(num_tokens + length, len(groups[-1]) + 1) is None
            if full or follows:
                groups.append([])
                num_tokens = 0
            groups[-1].append(part)
            num_tokens += length
    return groups


class StepWords:
    """On the host, int32: one array, and its tables, each [fields, width]. Padding, at first."""

    def __init__(self, size: StepSize, layout: PoolLayout) -> None:
        self._layout, num_taps = layout, _num_taps(layout)
        self.size = size
        self.words = _padding(size, num_taps, layout.waste_cell).copy()
        self.rows, self.tokens, self.blocks, chunks = _split(self.words, size, num_taps)
        self.chunks, self.samples = chunks[: len(CHUNK_FIELDS)], chunks[len(CHUNK_FIELDS) :]

    def put_rows(self, taken: TakenRows, slots: Slots) -> None:
        """Rows whose lengths are known, each with one token."""
        self.rows[:] = pack_inputs(self.size.num_rows, taken.arrays, self._layout.waste_cell)
        generated = slots.num_generated(taken.slots, taken.positions + 1)
        slots.columns.fill(self.rows, taken.slots, generated)

    def put_verified(
        self,
        taken: TakenRows,
        held: Rows,
        slots: Slots,
        is_left: np.ndarray | bool = False,  # bool [rows]: those whose tokens the sampler draws
    ) -> None:
        words, num_rows, span = self.rows, len(taken.rows), self.size.span
        none = np.zeros(num_rows, dtype=np.int64)
        waste_cell = self._layout.waste_cell
        arrays = taken.arrays._replace(cells=none + waste_cell)
        words[: len(FIELDS)] = pack_inputs(self.size.num_rows, arrays, waste_cell)
        slots.columns.fill(words[: len(FIELDS)], taken.slots, none)  # keys of number 0: the streams
        own = (
            *(taken.exact, taken.least, taken.depths, taken.num_kept),
            slots.prompt_lens[taken.slots],
            [row.drafted for row in taken.rows],
            is_left,
        )
        for field, values in enumerate(own, start=len(FIELDS)):
            words[field, :num_rows] = values
        words[FIRST_STOP:FIRST_CELL, :num_rows] = slots.stop_ids[taken.slots].T
        for number, row in enumerate(taken.rows):
            least, end = int(taken.least[number]), row.end
            cells = held.held(row.slot, least, end)
            words[FIRST_CELL : FIRST_CELL + len(cells), number] = cells
            if row.depth and (proposal := row.proposal) is not None:
                first = max(least + 1, proposal.start)
                part = proposal.tokens[first - proposal.start :][: least + 1 + span - first]
                at = FIRST_CELL + span + first - least - 1
                words[at : at + len(part), number] = part

    def put_chunks(self, taken: TakenChunks, held: Rows) -> None:
        """How they sample is filled in by others: all are greedy, and write no token."""
        num_tokens, num_chunks = int(taken.lengths.sum()), len(taken.rows)
        cells = [held.held(row.slot, row.start, row.end) for row in taken.rows]
        self.tokens[:3, :num_tokens] = taken.tokens, taken.positions, np.concatenate(cells)
        if num_taps := _num_taps(self._layout):
            places, _ = conv_places(taken, num_taps - 1, self.size.num_chunks)
            self.tokens[3:, :num_tokens] = places
        lines = _block_lines(taken)
        self.blocks[:, : lines.shape[1]] = lines
        ends = taken.starts + taken.lengths
        self.chunks[:, :num_chunks] = ends - 1, taken.first_blocks, taken.block_counts
        self.samples[FIELDS.index("state_in"), :num_chunks] = taken.states_in


def _num_taps(layout: PoolLayout) -> int:
    return layout.conv_shape[0] + 1 if layout.num_recurrent_layers else 0


def _block_lines(taken: TakenChunks) -> np.ndarray:
    """int64 [fields, blocks]: see `BlockInputs`."""
    starts, firsts, counts = taken.starts, taken.first_blocks, taken.block_counts
    owners = np.repeat(np.arange(len(counts)), counts)
    behind = (np.arange(len(owners)) - firsts[owners]) * GRID  # tokens of the row before a block
    slabs = np.zeros(len(owners), dtype=np.int64)
    slabs[taken.tap_blocks] = [tap.slab for tap in taken.taps]
    slabs[firsts + counts - 1] = taken.states_out
    return np.stack(
        [
            taken.slots[owners],
            np.array([row.start for row in taken.rows])[owners] + behind,
            starts[owners] + behind,
            np.minimum(taken.lengths[owners] - behind, GRID),
            starts[owners],
            taken.states_in[owners],
            slabs,
        ]
    )


class BlockInputs(NamedTuple):
    """Lines of one tensor on the device, integers [blocks] each."""

    slot: torch.Tensor
    position: torch.Tensor  # of the first token
    start: torch.Tensor
    length: torch.Tensor
    row_start: torch.Tensor
    state_in: torch.Tensor
    slab: torch.Tensor


class RecurrentInputs(NamedTuple):
    """What recurrent layers read of chunks: integers on the device."""

    places: torch.Tensor  # [taps, tokens]: see `ConvIndex.inputs`
    states_in: torch.Tensor  # [chunks]
    first_block: torch.Tensor  # [chunks]
    num_blocks: torch.Tensor  # [chunks]
    blocks: BlockInputs


@dataclass(frozen=True)
class StepInputs:
    """The words on the device, as kernels read them: int32."""

    size: StepSize
    rows: torch.Tensor  # [fields, rows]
    token: torch.Tensor  # [tokens], of chunks
    position: torch.Tensor  # [tokens]
    cell: torch.Tensor  # [tokens]
    last: torch.Tensor  # [chunks]
    recurrent: RecurrentInputs
    samples: Inputs  # of chunks

    @classmethod
    def of(cls, words: torch.Tensor, size: StepSize, layout: PoolLayout) -> StepInputs:
        rows, tokens, blocks, chunks = _split(words, size, _num_taps(layout))
        samples = Inputs(chunks[len(CHUNK_FIELDS) :])
        last, first_block, num_blocks = chunks[: len(CHUNK_FIELDS)]
        recurrent = RecurrentInputs(
            tokens[3:], samples.state_in, first_block, num_blocks, BlockInputs(*blocks)
        )
        return cls(size, rows, tokens[0], tokens[1], tokens[2], last, recurrent, samples)

    def column(self, name: str) -> torch.Tensor:
        """int32 [rows]"""
        return self.rows[(*FIELDS, *VERIFY_FIELDS).index(name)]


@dataclass(frozen=True)
class Places:
    """Tokens of rows that verify drafts, on the device: what each looks up, and its row."""

    step: StepInputs
    inputs: Inputs  # as a decode row's, of every token
    tokens: torch.Tensor  # int32 [tokens]
    drafts: torch.Tensor  # int32 [rows, depth], NO_TOKEN where there is none
    starts: torch.Tensor  # int32 [rows]
    counts: torch.Tensor  # int32 [rows]: kept drafts that are run first


Words = TypeVar("Words", np.ndarray, torch.Tensor)


def _split(words: Words, size: StepSize, num_taps: int) -> list[Words]:
    """Views of the tables."""
    found: list[Words] = []
    first = 0
    for height, width in _tables(size, num_taps):
        found.append(words[first : first + height * width].reshape(height, width))
        first += height * width
    return found


@lru_cache(maxsize=256)  # a step of one row is ready in 0.1 ms
def _padding(size: StepSize, num_taps: int, waste_cell: int) -> np.ndarray:
    """Of no rows and no chunks."""
    sizes = (height * width for height, width in _tables(size, num_taps))
    words = np.zeros(sum(sizes), dtype=np.int32)
    rows, tokens, _, chunks = _split(words, size, num_taps)
    rows[: len(FIELDS)] = pack_inputs(size.num_rows, NO_ROWS, waste_cell)
    if size.span:
        rows[len(FIELDS)] = 1
        rows[FIRST_STOP:FIRST_CELL] = NO_TOKEN
        rows[FIRST_CELL : FIRST_CELL + size.span] = waste_cell
        rows[FIRST_CELL + size.span :] = NO_TOKEN
    tokens[2] = waste_cell
    if num_taps:
        tokens[3:] = size.num_chunks * (num_taps - 1) + np.arange(size.num_tokens)
    chunks[len(CHUNK_FIELDS) :] = pack_inputs(size.num_chunks, NO_ROWS, waste_cell)
    return words


def _tables(size: StepSize, num_taps: int) -> tuple[tuple[int, int], ...]:
    """Fields and widths."""
    return (
        (size.num_fields, size.num_rows),
        (len(TOKEN_FIELDS) + num_taps, size.num_tokens),
        (len(BlockInputs._fields), size.num_blocks),
        (len(CHUNK_FIELDS) + len(FIELDS), size.num_chunks),
    )
