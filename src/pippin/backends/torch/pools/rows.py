"""What each slot holds: its cells of each kind, and its state slot. Knows no model and no plans.

state of a slot   read where it is; written there too, unless it has another holder:
                  then the next forward reads it there and writes another one
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
        self.keeps_states = pools.layout.num_delta_layers > 0
        self.cells = RowCells(pools, Component.ATTENTION, num_slots, max_len)
        self.windows: RowCells | None = None
        if pools.layout.cell_bytes(Component.WINDOW):
            window = pools.layout.shape.window
            self.windows = RowCells(pools, Component.WINDOW, num_slots, max_len, window)
        self._kinds = [self.cells] if self.windows is None else [self.cells, self.windows]
        self.lengths = np.zeros(num_slots + 1, dtype=np.int64)
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
        self.lengths[slot] = length

    def grow(self, slot: int, num_tokens: int) -> None:
        """Cells for so many more tokens of one slot."""
        for cells in self._kinds:
            cells.grow(slot, num_tokens)
        self.lengths[slot] += num_tokens

    def grow_each(self, slots: np.ndarray) -> np.ndarray:
        """A cell for one more token of each slot; of layers that see every token, int32."""
        cells = self.cells.grow_each(slots)
        if self.windows is not None:
            self.windows.grow_each(slots)
        self.lengths[slots] += 1
        return cells

    def release_passed(self, slots: np.ndarray) -> None:
        """Of what their next tokens do not see any more: their forward has been launched."""
        if self.windows is not None:
            self.windows.release_passed(slots)

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
        self.lengths[slot] = 0
        self.states[slot] = ZERO_SLAB
