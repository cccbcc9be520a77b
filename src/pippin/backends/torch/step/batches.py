"""A step's rows as index arrays: what a forward looks up and where it writes. Knows no model.

Everything is decided on the host and sent without waiting; nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pippin.backends.base import PrefillRow
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.row_cells import RowCells
from pippin.backends.torch.pools.rows import Rows
from pippin.backends.torch.step.decode_inputs import RowArrays
from pippin.types import GRID


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
class ConvIndex:
    """Inputs of a causal convolution over packed rows: places in [rows' last inputs | tokens]."""

    inputs: torch.Tensor  # int64 [num_taps, tokens], the newest last
    after: torch.Tensor  # int64 [rows + taps, num_taps - 1]: what comes next reads these first


@dataclass(frozen=True)
class HeldCells:
    """Of the layers of one kind: where the new tokens' KV goes, and what they see."""

    cells: torch.Tensor  # int64 [tokens]
    seen: tuple[torch.Tensor, ...]  # int64, of each row its cells, the new ones last


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


def chunk_batch(taken: TakenChunks, held: Rows, pools: Pools) -> ChunkBatch:
    spans = [(row.slot, row.start, row.end) for row in taken.rows]
    index = pools.index
    return ChunkBatch(
        taken.lengths.tolist(),
        index(taken.tokens),
        index(taken.positions),
        index(taken.states_in),
        index(taken.states_out),
        *_held_cells(held, spans, pools),
        taken=taken,
        last=index(np.cumsum(taken.lengths) - 1),
        conv=_conv_index(taken, pools) if held.keeps_states else None,
    )


def decode_batch(rows: RowArrays, tokens: torch.Tensor, held: Rows, pools: Pools) -> Batch:
    """One token of each row, int64 [rows], for which cells have been taken."""
    index = pools.index
    spans = [(slot, at, at + 1) for slot, at in zip(rows.slots, rows.positions, strict=True)]
    return Batch(
        [1] * len(spans),
        tokens,
        index(rows.positions),
        index(rows.states_in),
        index(rows.states_out),
        *_held_cells(held, spans, pools),
    )


def _held_cells(
    held: Rows, spans: Sequence[tuple[int, int, int]], pools: Pools
) -> tuple[HeldCells, HeldCells | None]:
    """Of new tokens [start, end) of each slot, for which cells have been taken."""

    def of_kind(cells: RowCells) -> HeldCells:
        new = [cells.held(slot, start, end) for slot, start, end in spans]
        seen = [cells.held(slot, cells.first_seen(start), end) for slot, start, end in spans]
        return HeldCells(pools.index(np.concatenate(new)), tuple(map(pools.index, seen)))

    return of_kind(held.cells), None if held.windows is None else of_kind(held.windows)


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
