"""What captured chunks of prompts read, as one array of words: sent in one copy.

    by token   token | position | cell | places of its convolution's inputs, the newest last
    by block   slot | position | first token | tokens | the row's first token | state in | slab
    by row     last token | first block | blocks, and what a decode step's rows have: the slot that
               the next token goes to, where the row's state is read, how it samples

A block is GRID tokens of one row, or what is left of them; a slab is where the state after it goes,
0: nowhere. What a graph has room for and chunks do not fill is padding: tokens of no block, whose
KV goes to waste; blocks without tokens; rows without blocks, whose next token goes to slot 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.pools.rows import Rows
from pippin.backends.torch.step.batches import TakenChunks, conv_places
from pippin.backends.torch.step.decode_inputs import FIELDS as SAMPLE_FIELDS
from pippin.backends.torch.step.decode_inputs import NO_ROWS, Inputs, pack_inputs
from pippin.backends.torch.step.sizes import Room
from pippin.types import GRID

TOKEN_FIELDS = ("token", "position", "cell")  # and the places
ROW_FIELDS = ("last", "first_block", "num_blocks")


@dataclass(frozen=True)
class ChunkWords:
    """On the host, int32: one array, and its three tables, each [fields, width]."""

    words: np.ndarray
    tokens: np.ndarray
    blocks: np.ndarray
    rows: np.ndarray
    samples: np.ndarray  # the last fields of the rows, as `pack_inputs` has them

    @classmethod
    def padding(cls, room: Room, layout: PoolLayout) -> ChunkWords:
        num_taps = num_taps_of(layout)
        sizes = (height * width for height, width in _tables(room, num_taps))
        words = np.zeros(sum(sizes), dtype=np.int32)
        tokens, blocks, rows = _split(words, room, num_taps)
        tokens[2] = layout.waste_cell
        tokens[3:] = room.num_rows * layout.conv_shape[0] + np.arange(room.num_tokens)
        rows[len(ROW_FIELDS) :] = pack_inputs(room.num_rows, NO_ROWS, layout.waste_cell)
        return cls(words, tokens, blocks, rows[: len(ROW_FIELDS)], rows[len(ROW_FIELDS) :])


def num_taps_of(layout: PoolLayout) -> int:
    return layout.conv_shape[0] + 1 if layout.num_recurrent_layers else 0


def pack_chunks(room: Room, taken: TakenChunks, held: Rows, layout: PoolLayout) -> ChunkWords:
    """What the rows sample is filled in by others: all are greedy, and write no token."""
    words = ChunkWords.padding(room, layout)
    num_tokens, num_rows = int(taken.lengths.sum()), len(taken.rows)
    cells = [held.held(row.slot, row.start, row.end) for row in taken.rows]
    words.tokens[:3, :num_tokens] = taken.tokens, taken.positions, np.concatenate(cells)
    if num_taps := num_taps_of(layout):
        places, _ = conv_places(taken, num_taps - 1, room.num_rows)
        words.tokens[3:, :num_tokens] = places
    lines = block_lines(taken)
    words.blocks[:, : lines.shape[1]] = lines
    ends = taken.starts + taken.lengths
    words.rows[:, :num_rows] = ends - 1, taken.first_blocks, taken.block_counts
    words.samples[SAMPLE_FIELDS.index("state_in"), :num_rows] = taken.states_in
    return words


def block_lines(taken: TakenChunks) -> np.ndarray:
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
    """What recurrent layers read: integers on the device."""

    places: torch.Tensor  # [taps, tokens]: see `ConvIndex.inputs`
    states_in: torch.Tensor  # [rows]
    first_block: torch.Tensor  # [rows]
    num_blocks: torch.Tensor  # [rows]
    blocks: BlockInputs


@dataclass(frozen=True)
class ChunkInputs:
    """The words of `ChunkWords` on the device, as kernels read them: int32."""

    token: torch.Tensor  # [tokens]
    position: torch.Tensor  # [tokens]
    cell: torch.Tensor  # [tokens]
    last: torch.Tensor  # [rows]
    recurrent: RecurrentInputs
    samples: Inputs

    @classmethod
    def of(cls, words: torch.Tensor, room: Room, layout: PoolLayout) -> ChunkInputs:
        tokens, blocks, rows = _split(words, room, num_taps_of(layout))
        samples = Inputs(rows[len(ROW_FIELDS) :])
        first_block, num_blocks = rows[1], rows[2]
        recurrent = RecurrentInputs(
            tokens[3:], samples.state_in, first_block, num_blocks, BlockInputs(*blocks)
        )
        return cls(tokens[0], tokens[1], tokens[2], rows[0], recurrent, samples)


Words = TypeVar("Words", np.ndarray, torch.Tensor)


def _split(words: Words, room: Room, num_taps: int) -> list[Words]:
    """Views of the three tables."""
    found: list[Words] = []
    first = 0
    for height, width in _tables(room, num_taps):
        found.append(words[first : first + height * width].reshape(height, width))
        first += height * width
    return found


def _tables(room: Room, num_taps: int) -> tuple[tuple[int, int], ...]:
    """Fields and widths."""
    return (
        (len(TOKEN_FIELDS) + num_taps, room.num_tokens),
        (len(BlockInputs._fields), room.num_blocks),
        (len(ROW_FIELDS) + len(SAMPLE_FIELDS), room.num_rows),
    )
