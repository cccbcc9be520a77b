"""A step's rows: what they take on the host, and as index arrays what a forward in plain operations
looks up and where it writes.

The host decides all but how many drafts are accepted: of a row that has some it knows two bounds of
its length, and the rest is looked up on the device. Nothing is read back.

    chunks    packed    [ tokens of a row | tokens of the next ]
    decodes   packed    [ input, draft, draft | input | input, draft ]      each row its own depth
              padded    [rows, width], width that of the deepest row
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pippin.backends.base import DecodeRow, PrefillRow
from pippin.backends.step.slots import FutureMap
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.rows import RowCells, Rows
from pippin.backends.torch.step.decode_inputs import RowArrays
from pippin.types import GRID

NO_TOKEN = -1


@dataclass(frozen=True)
class Tap:
    """The state after a block inside a chunk, for the tree."""

    row: int
    position: int
    slab: int


@dataclass(frozen=True)
class TakenChunks:
    """Chunks of several prompts for which cells and states have been taken; on the host."""

    rows: tuple[PrefillRow, ...]
    states_in: np.ndarray  # int64 [rows]
    states_out: np.ndarray
    taps: tuple[Tap, ...]

    @property
    def slots(self) -> np.ndarray:
        return np.array([row.slot for row in self.rows])

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]: of the rows' new tokens."""
        return np.array([len(row.tokens) for row in self.rows])

    @property
    def starts(self) -> np.ndarray:
        """int64 [rows]: each row's first token, where they are packed."""
        found: np.ndarray = np.cumsum(self.lengths) - self.lengths
        return found

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([row.tokens for row in self.rows])

    @property
    def positions(self) -> np.ndarray:
        return np.concatenate([np.arange(row.start, row.end) for row in self.rows])

    @property
    def block_counts(self) -> np.ndarray:
        """int64 [rows]: each row's blocks, of GRID tokens or what is left of them."""
        found: np.ndarray = -(-self.lengths // GRID)
        return found

    @property
    def first_blocks(self) -> np.ndarray:
        """int64 [rows]: each row's first block."""
        found: np.ndarray = np.cumsum(self.block_counts) - self.block_counts
        return found

    @property
    def tap_blocks(self) -> list[int]:
        """Which block each tap is the end of."""
        found, firsts = [], self.first_blocks.tolist()
        for tap in self.taps:
            behind = tap.position - self.rows[tap.row].start
            assert behind % GRID == 0, "states inside a chunk are tapped every GRID tokens"
            found.append(firsts[tap.row] + behind // GRID - 1)
        return found


@dataclass(frozen=True)
class TakenRows:
    """Decode rows for which cells and states have been taken; on the host, int64 [rows]."""

    rows: tuple[DecodeRow, ...]
    arrays: RowArrays  # its cells are those of rows that all have one token and a known length
    least: np.ndarray  # positions of the input tokens, at least
    depths: np.ndarray
    num_kept: np.ndarray  # drafts of the last step: those that it accepted are run first

    @property
    def slots(self) -> np.ndarray:
        return self.arrays.slots

    @property
    def positions(self) -> np.ndarray:
        """Of the input tokens, at most."""
        return self.arrays.positions

    @property
    def exact(self) -> np.ndarray:
        found: np.ndarray = self.least == self.positions
        return found

    @property
    def width(self) -> int:
        """Tokens of the deepest row."""
        return 1 + int(self.depths.max())

    @property
    def places(self) -> np.ndarray:
        """int64 [tokens]: of the packed tokens, where they are padded."""
        width = np.arange(self.width)
        return np.flatnonzero(width <= self.depths[:, None])


@dataclass(frozen=True)
class ConvIndex:
    """Inputs of a causal convolution over packed rows: places in [rows' last inputs | tokens]."""

    inputs: torch.Tensor  # int64 [num_taps, tokens], the newest last
    after: torch.Tensor  # int64 [rows + taps, num_taps - 1]: what comes next reads these first


@dataclass(frozen=True)
class SeenCells:
    """What the tokens of one row see."""

    cells: torch.Tensor  # int64 [cells], the new ones last
    # Where the length is not known: bool [cells], which of them the row has written; and bool
    # [tokens, cells], which of them are up to each token.
    written: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class HeldCells:
    """Of the layers of one kind: where the new tokens' KV goes, and what they see."""

    cells: torch.Tensor  # int64 [tokens]
    seen: tuple[SeenCells, ...]  # of each row


@dataclass(frozen=True)
class Batch:
    """New tokens of several rows, packed one row behind the other."""

    lengths: list[int]  # of the rows' new tokens
    tokens: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    states_in: torch.Tensor  # int64 [rows]
    states_out: torch.Tensor
    held: HeldCells
    windows: HeldCells | None  # of layers with a window


@dataclass(frozen=True)
class ChunkBatch(Batch):
    taken: TakenChunks
    last: torch.Tensor  # int64 [rows]: each row's last token
    conv: ConvIndex | None


@dataclass(frozen=True)
class DecodeBatch(Batch):
    width: int
    slots: torch.Tensor  # int64 [rows]
    starts: torch.Tensor  # int64 [rows]: the input tokens' positions
    drafts: torch.Tensor  # int32 [rows, width - 1], NO_TOKEN where there is none
    places: torch.Tensor  # int64 [tokens]: where they are padded
    counts: torch.Tensor  # int64 [rows]: kept drafts that are run first
    most_kept: int  # of these, at most


def take_chunks(rows: Sequence[PrefillRow], held: Rows, pools: Pools) -> TakenChunks:
    """Takes the cells and states that the chunks write."""
    for row in rows:
        held.grow(row.slot, len(row.tokens))
    taps = tuple(
        Tap(number, position, pools.arena.take_state())
        for number, row in enumerate(rows)
        for position in inner_checkpoints(row)
        if held.keeps_states
    )
    # After the taps: it frees what rows still read.
    states_in, states_out = held.next_states(np.array([row.slot for row in rows]))
    return TakenChunks(tuple(rows), states_in, states_out, taps)


def take_rows(
    rows: Sequence[DecodeRow], held: Rows, pools: Pools, *, send: bool = True
) -> TakenRows:
    """Takes the cells and states that the rows write. `send`: False: the device's table learns of
    the cells in the step."""
    slots = np.array([row.slot for row in rows])
    positions = np.array([row.position for row in rows])
    depths = np.array([row.depth for row in rows])
    least, num_kept = held.least_lengths[slots], held.num_kept[slots]
    num_cells = held.num_missing(slots, positions + 1 + depths)
    pools.arena.make_room(num_cells, held.num_new_states(slots))
    cells = np.zeros(0, dtype=np.int32)
    if depths.any() or num_kept.any() or not held.is_exact(slots, positions).all():
        held.reserve_each(slots, positions, depths, send=send)
    else:
        cells = held.grow_each(slots, positions, send=send)
    arrays = RowArrays(slots, positions, cells, *held.next_states(slots))
    return TakenRows(tuple(rows), arrays, least, depths, num_kept)


def chunk_batch(taken: TakenChunks, held: Rows, pools: Pools) -> ChunkBatch:
    index = pools.index

    def of_kind(cells: RowCells) -> HeldCells:
        spans = [(row.slot, row.start, row.end) for row in taken.rows]
        new = [cells.held(*span) for span in spans]
        seen = [cells.held(slot, cells.first_seen(start), end) for slot, start, end in spans]
        return HeldCells(index(np.concatenate(new)), tuple(SeenCells(index(own)) for own in seen))

    return ChunkBatch(
        taken.lengths.tolist(),
        index(taken.tokens),
        index(taken.positions),
        index(taken.states_in),
        index(taken.states_out),
        of_kind(held.cells),
        None if held.windows is None else of_kind(held.windows),
        taken=taken,
        last=index(np.cumsum(taken.lengths) - 1),
        conv=_conv_index(taken, pools) if held.keeps_states else None,
    )


def decode_batch(
    taken: TakenRows, held: Rows, future: FutureMap[torch.Tensor], pools: Pools
) -> DecodeBatch:
    index, width = pools.index, taken.width
    slots, depths = index(taken.slots), index(taken.depths)
    starts = index(taken.positions)
    if not taken.exact.all():
        starts = torch.where(index(taken.exact) > 0, starts, future.lengths[slots].long())
    drafts = _drafts(taken, slots, starts, depths, future, pools)
    places = index(taken.places)
    inputs = torch.cat([future.tokens[slots, None], drafts.clamp_min(0)], dim=1)
    positions = starts[:, None] + torch.arange(width, device=pools.device)
    owners = slots[:, None].expand_as(positions).flatten()[places]
    positions = positions.flatten()[places]

    def of_kind(cells: RowCells) -> HeldCells:
        seen = [_seen(taken, row, starts, cells, pools) for row in range(len(taken.rows))]
        return HeldCells(cells.table[owners, positions].long(), tuple(seen))

    return DecodeBatch(
        (1 + taken.depths).tolist(),
        inputs.flatten()[places].long(),
        positions,
        index(taken.arrays.states_in),
        index(taken.arrays.states_out),
        of_kind(held.cells),
        None if held.windows is None else of_kind(held.windows),
        width=width,
        slots=slots,
        starts=starts,
        drafts=drafts,
        places=places,
        counts=torch.where(index(taken.num_kept) > 0, future.counts[slots].long(), 0),
        most_kept=int(taken.num_kept.max()),
    )


def _drafts(
    taken: TakenRows,
    slots: torch.Tensor,
    starts: torch.Tensor,
    depths: torch.Tensor,
    future: FutureMap[torch.Tensor],
    pools: Pools,
) -> torch.Tensor:
    """int32 [rows, width - 1]: those behind the rows' lengths, of the host's or of the device's."""
    depth = taken.width - 1
    if not depth:
        return slots.new_zeros(len(slots), 0, dtype=torch.int32)
    behind = torch.arange(depth, device=pools.device)
    bases, proposed = _proposed(taken)
    known = pools.index(proposed)
    at = starts[:, None] + 1 + behind - pools.index(bases)[:, None]
    inside = (at >= 0) & (at < known.shape[1])
    found = known.gather(1, at.clamp(0, known.shape[1] - 1)).masked_fill(~inside, NO_TOKEN)
    on_device = [row.drafted for row in taken.rows]
    for row, is_own in zip(taken.rows, on_device, strict=True):
        if is_own:
            future.note_drafts_read(row.slot, row.depth)
    if any(on_device):
        own = pools.index(np.array(on_device))[:, None] > 0
        found = torch.where(own, future.drafts[slots, :depth].long(), found)
    return found.masked_fill(behind >= depths[:, None], NO_TOKEN).int()


def _proposed(taken: TakenRows) -> tuple[np.ndarray, np.ndarray]:
    """What the host proposes of positions from a base on, int64 [rows] and [rows, n].

    No more than there can be drafts: a row's length has two bounds.
    """
    most = int((taken.positions - taken.least + taken.depths).max())
    tokens = np.full((len(taken.rows), max(most, 1)), NO_TOKEN, dtype=np.int64)
    bases = taken.least + 1
    for number, row in enumerate(taken.rows):
        if row.depth and (proposal := row.proposal) is not None:
            base = bases[number] = max(int(bases[number]), proposal.start)
            part = proposal.tokens[base - proposal.start :][: tokens.shape[1]]
            tokens[number, : len(part)] = part
    return bases, tokens


def _seen(
    taken: TakenRows, row: int, starts: torch.Tensor, cells: RowCells, pools: Pools
) -> SeenCells:
    least, most = int(taken.least[row]), int(taken.positions[row])
    depth = int(taken.depths[row])
    first, end = cells.first_seen(least), most + 1 + depth
    seen = pools.index(cells.held(int(taken.slots[row]), first, end))
    if least == most:
        return SeenCells(seen)
    keys = torch.arange(first, end, device=pools.device)
    last = starts[row] + torch.arange(1 + depth, device=pools.device)[:, None]
    return SeenCells(seen, keys <= last[-1], keys <= last)


def inner_checkpoints(row: PrefillRow) -> list[int]:
    """Those before the chunk's end; at its end the row's own state is what is captured."""
    return [at for at in row.checkpoints if at != row.end] if row.captures else []


def conv_places(taken: TakenChunks, kept: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The arrays of `ConvIndex`, of a convolution that keeps so many inputs.

    Places are in [last inputs of `num_rows` rows | tokens]: there may be more rows than are taken.
    """
    rows, starts = taken.rows, taken.starts
    window = np.arange(-kept, 0)

    def places(row: int, behind: np.ndarray) -> np.ndarray:
        """Of inputs so many tokens behind the chunk's start; before it they are the state's."""
        tokens = num_rows * kept + starts[row] + behind
        found: np.ndarray = np.where(behind < 0, row * kept + kept + behind, tokens)
        return found

    inputs = [
        places(number, np.arange(len(row.tokens)) + np.arange(-kept, 1)[:, None])
        for number, row in enumerate(rows)
    ]
    ends = [(number, len(row.tokens)) for number, row in enumerate(rows)]
    ends += [(tap.row, tap.position - rows[tap.row].start) for tap in taken.taps]
    after = np.stack([places(number, window + end) for number, end in ends])
    return np.concatenate(inputs, axis=1), after


def _conv_index(taken: TakenChunks, pools: Pools) -> ConvIndex:
    inputs, after = conv_places(taken, pools.layout.conv_shape[0], len(taken.rows))
    return ConvIndex(pools.index(inputs), pools.index(after))
