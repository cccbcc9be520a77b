"""What each slot holds: its cells of each kind, and its state slot. Knows no model and no plans.

state of a slot   read where it is; written there too, unless it has another holder:
                  then the next forward reads it there and writes another one
length            between two bounds, while it is not known how many drafts were accepted; cells
                  are taken for the upper one. The state is that before the accepted drafts.
"""

from __future__ import annotations

import numpy as np
import torch

from pippin.backends.torch.pools.layout import ZERO_SLAB
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.row_cells import RowCells
from pippin.types import Component


class Rows:
    def __init__(self, pools: Pools, num_slots: int, max_len: int) -> None:
        self._pools = pools
        self.keeps_states = pools.layout.num_recurrent_layers > 0
        self.cells = RowCells(pools, Component.ATTENTION, num_slots, max_len)
        self.windows: RowCells | None = None
        if pools.layout.cell_bytes(Component.WINDOW):
            window = pools.layout.shape.window
            self.windows = RowCells(pools, Component.WINDOW, num_slots, max_len, window)
        self._kinds = [self.cells] if self.windows is None else [self.cells, self.windows]
        self.lengths = np.zeros(num_slots + 1, dtype=np.int64)  # at most
        self.least_lengths = np.zeros(num_slots + 1, dtype=np.int64)
        self.num_kept = np.zeros(num_slots + 1, dtype=np.int64)  # drafts of the last step
        self._lives = np.zeros(num_slots + 1, dtype=np.int64)  # requests that each slot has had
        self.states = np.full(num_slots + 1, ZERO_SLAB, dtype=np.int64)

    @property
    def table(self) -> torch.Tensor:
        """int32 [slots, positions]: the cells of layers that see every token."""
        return self.cells.table

    def held(self, slot: int, start: int, end: int) -> np.ndarray:
        return self.cells.held(slot, start, end)

    def borrow(
        self,
        slot: int,
        length: int,
        cells: np.ndarray,
        windows: np.ndarray,
        slab: int,
    ) -> None:
        """Begin with a restored prefix of `length` tokens: read in place what the tree holds."""
        assert self.lengths[slot] == 0
        self.cells.borrow(slot, length, cells)
        if self.windows is not None:
            self.windows.borrow(slot, length, windows)
        if slab != ZERO_SLAB:
            self._pools.arena.hold_state(slab)
        self.states[slot] = slab
        self.lengths[slot] = self.least_lengths[slot] = length

    def grow(self, slot: int, num_tokens: int) -> None:
        """Cells for so many more tokens of one slot, which has no drafts."""
        assert not self.num_kept[slot]
        for cells in self._kinds:
            cells.grow(slot, num_tokens)
        self.lengths[slot] += num_tokens
        self.least_lengths[slot] += num_tokens

    def grow_each(self, slots: np.ndarray, positions: np.ndarray, *, send: bool) -> np.ndarray:
        """A cell for one more token of each slot, which has that position; of layers that see
        every token, int32. `send`: as for `reserve_each`."""
        cells = self.cells.grow_each(slots, positions, send=send)
        if self.windows is not None:
            self.windows.grow_each(slots, positions, send=send)
        self.lengths[slots] = self.least_lengths[slots] = positions + 1
        return cells

    def is_exact(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Of rows that hold so many tokens at most, bool: whether they hold no fewer."""
        least = self.least_lengths[slots]
        assert (least <= positions).all(), "positions must follow each other"
        assert (positions <= self.lengths[slots]).all(), "positions must follow each other"
        exact: np.ndarray = least == positions
        return exact

    def holds(self, slot: int, end: int) -> bool:
        """Whether the row is of that length, or can be: it can do without drafts of its last
        step."""
        least = int(self.least_lengths[slot])
        return least - int(self.num_kept[slot]) <= end <= int(self.lengths[slot])

    def num_missing(self, slots: np.ndarray, ends: np.ndarray) -> int:
        """Cells that `reserve_each` takes, of each kind."""
        return int(np.maximum(ends - self.cells.num_reserved(slots), 0).sum())

    def reserve_each(
        self, slots: np.ndarray, positions: np.ndarray, depths: np.ndarray, *, send: bool
    ) -> None:
        """Cells for an input token, which has that position at most, and drafts behind it.

        `send`: False: the device's table learns of them in the step.
        """
        ends = positions + 1 + depths
        for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
            for cells in self._kinds:
                cells.reserve(slot, end, send=send)
        self.lengths[slots] = ends
        self.least_lengths[slots] += 1
        self.num_kept[slots] = depths

    def lives(self, slots: np.ndarray) -> np.ndarray:
        """Which request of each slot's this is, for `note_accepted`."""
        found: np.ndarray = self._lives[slots]
        return found

    def note_accepted(self, slots: np.ndarray, lives: np.ndarray, counts: np.ndarray) -> None:
        """So many drafts were accepted by a step of these requests, if they still run."""
        same = self._lives[slots] == lives
        self.least_lengths[slots[same]] += counts[same]

    def release_passed(self, slots: np.ndarray) -> None:
        """Of what their next tokens do not see any more: their forward has been launched."""
        if self.windows is not None:
            self.windows.release_passed(slots, self.least_lengths[slots])

    def num_new_states(self, slots: np.ndarray) -> int:
        """How many of these slots can not write their state where it is."""
        if not self.keeps_states:
            return 0
        return int(np.count_nonzero(self._pools.arena.is_shared(self.states[slots])))

    def next_states(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the next forward reads and writes these slots' states, int64.

        What slots let go of is free when all have taken theirs: rows of one forward run in any
        order, so none may write what another one reads.
        """
        before = self.states[slots]
        after = before.copy()
        if self.keeps_states:
            places = np.flatnonzero(self._pools.arena.is_shared(before))
            after[places] = [self._pools.arena.take_state() for _ in places]
            for slab in before[places].tolist():
                self._pools.arena.release_state(slab)
            self.states[slots] = after
        return before, after

    def retire(self, slot: int) -> None:
        for cells in self._kinds:
            cells.retire(slot)
        self._pools.arena.release_state(int(self.states[slot]))
        self.lengths[slot] = self.least_lengths[slot] = self.num_kept[slot] = 0
        self._lives[slot] += 1
        self.states[slot] = ZERO_SLAB
