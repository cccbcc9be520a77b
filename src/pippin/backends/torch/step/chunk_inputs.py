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
from functools import cached_property

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
BLOCK_FIELDS = ("slot", "position", "start", "length", "row_start", "state_in", "slab")
ROW_FIELDS = ("last", "first_block", "num_blocks")


@dataclass(frozen=True)
class ChunkWords:
    """On the host, int32: three tables of one array."""

    words: np.ndarray
    room: Room
    num_taps: int  # of a convolution; 0: there is none

    @classmethod
    def padding(cls, room: Room, layout: PoolLayout) -> ChunkWords:
        num_taps = num_taps_of(layout)
        words = cls(np.zeros(sum(_sizes(room, num_taps)), dtype=np.int32), room, num_taps)
        words.tokens[2] = layout.waste_cell
        words.tokens[3:] = room.num_rows * layout.conv_shape[0] + np.arange(room.num_tokens)
        words.samples[:] = pack_inputs(room.num_rows, NO_ROWS, layout.waste_cell)
        return words

    @property
    def tokens(self) -> np.ndarray:
        """[fields, tokens]"""
        return self._table(0, self.room.num_tokens)

    @property
    def blocks(self) -> np.ndarray:
        return self._table(1, self.room.num_blocks)

    @property
    def rows(self) -> np.ndarray:
        return self._table(2, self.room.num_rows)[: len(ROW_FIELDS)]

    @property
    def samples(self) -> np.ndarray:
        """[fields, rows], as `pack_inputs` has them."""
        return self._table(2, self.room.num_rows)[len(ROW_FIELDS) :]

    def _table(self, number: int, width: int) -> np.ndarray:
        sizes = _sizes(self.room, self.num_taps)
        first = sum(sizes[:number])
        return self.words[first : first + sizes[number]].reshape(-1, width)


def num_taps_of(layout: PoolLayout) -> int:
    return layout.conv_shape[0] + 1 if layout.num_delta_layers else 0


def pack_chunks(room: Room, taken: TakenChunks, held: Rows, layout: PoolLayout) -> ChunkWords:
    """What the rows sample is filled in by others: all are greedy, and write no token."""
    words = ChunkWords.padding(room, layout)
    lengths, starts = taken.lengths, taken.starts
    num_tokens, num_rows = int(lengths.sum()), len(lengths)
    cells = [held.held(row.slot, row.start, row.end) for row in taken.rows]
    words.tokens[:3, :num_tokens] = taken.tokens, taken.positions, np.concatenate(cells)
    if words.num_taps:
        places, _ = conv_places(taken, words.num_taps - 1, room.num_rows)
        words.tokens[3:, :num_tokens] = places

    counts = -(-lengths // GRID)
    firsts = np.cumsum(counts) - counts
    owners = np.repeat(np.arange(num_rows), counts)
    behind = (np.arange(len(owners)) - firsts[owners]) * GRID  # tokens of the row before a block
    slabs = np.zeros(len(owners), dtype=np.int64)
    if held.keeps_states:
        slabs[taken.tap_blocks(firsts.tolist())] = [tap.slab for tap in taken.taps]
        slabs[firsts + counts - 1] = taken.states_out
    words.blocks[:, : len(owners)] = (
        taken.slots[owners],
        np.array([row.start for row in taken.rows])[owners] + behind,
        starts[owners] + behind,
        np.minimum(lengths[owners] - behind, GRID),
        starts[owners],
        taken.states_in[owners],
        slabs,
    )
    words.rows[:, :num_rows] = starts + lengths - 1, firsts, counts
    words.samples[SAMPLE_FIELDS.index("state_in"), :num_rows] = taken.states_in
    return words


@dataclass(frozen=True)
class BlockInputs:
    """Lines of one tensor on the device, int32 [blocks] each."""

    slot: torch.Tensor
    position: torch.Tensor  # of the first token
    start: torch.Tensor
    length: torch.Tensor
    row_start: torch.Tensor
    state_in: torch.Tensor
    slab: torch.Tensor


@dataclass(frozen=True)
class ChunkInputs:
    """The same words on the device, as kernels read them."""

    words: torch.Tensor  # int32 [n]
    room: Room
    num_taps: int

    @cached_property
    def _tables(self) -> tuple[torch.Tensor, ...]:
        room = self.room
        widths = room.num_tokens, room.num_blocks, room.num_rows
        parts = self.words.split(_sizes(room, self.num_taps))
        return tuple(part.view(-1, width) for part, width in zip(parts, widths, strict=True))

    @property
    def token(self) -> torch.Tensor:
        """int32 [tokens], as the next two."""
        return self._tables[0][0]

    @property
    def position(self) -> torch.Tensor:
        return self._tables[0][1]

    @property
    def cell(self) -> torch.Tensor:
        return self._tables[0][2]

    @property
    def places(self) -> torch.Tensor:
        """int32 [taps, tokens]: see `ConvIndex.inputs`."""
        return self._tables[0][len(TOKEN_FIELDS) :]

    @property
    def blocks(self) -> BlockInputs:
        return BlockInputs(*self._tables[1])

    @property
    def last(self) -> torch.Tensor:
        """int32 [rows], as the next two."""
        return self._tables[2][0]

    @property
    def first_block(self) -> torch.Tensor:
        return self._tables[2][1]

    @property
    def num_blocks(self) -> torch.Tensor:
        return self._tables[2][2]

    @property
    def samples(self) -> Inputs:
        return Inputs(self._tables[2][len(ROW_FIELDS) :])


def _sizes(room: Room, num_taps: int) -> list[int]:
    """Of the three tables, in words."""
    return [
        (len(TOKEN_FIELDS) + num_taps) * room.num_tokens,
        len(BLOCK_FIELDS) * room.num_blocks,
        (len(ROW_FIELDS) + len(SAMPLE_FIELDS)) * room.num_rows,
    ]
