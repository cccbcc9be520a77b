"""What each slot holds: its cells by position, and its state slot. Knows no model and no plans.

    cells of a slot   [ borrowed from the tree | its own ]      all of them held once by the slot
    state of a slot   read where it is; written there too, unless somebody else holds it as well:
                      then the next forward reads it there and writes another one

The table is the classic `req_to_token`: the cell of every position, by slot, for kernels to look
up. On a CPU the device's table is the host's own.
"""

from __future__ import annotations

import numpy as np
import torch

from pippin.backends.torch.pools.layout import ZERO_SLAB
from pippin.backends.torch.pools.memory import Pools


class Rows:
    def __init__(self, pools: Pools, num_slots: int, max_len: int) -> None:
        self._pools = pools
        self._arena = pools.arena
        self.cells = np.zeros((num_slots + 1, max_len), dtype=np.int32)
        self.lengths = np.zeros(num_slots + 1, dtype=np.int64)
        self.states = np.full(num_slots + 1, ZERO_SLAB, dtype=np.int64)
        host = torch.from_numpy(self.cells)
        self.table = (
            host if pools.device.type == "cpu" else torch.zeros_like(host, device=pools.device)
        )
        self._arena.holders.add(self)

    @property
    def keeps_states(self) -> bool:
        return self._pools.layout.num_delta_layers > 0

    def held(self, slot: int, start: int, end: int) -> np.ndarray:
        return self.cells[slot, start:end]

    def borrow(self, slot: int, cells: np.ndarray, slab: int) -> None:
        """Begin with a restored prefix: read in place what the tree holds."""
        assert self.lengths[slot] == 0
        self._arena.hold_cells(cells)
        if slab != ZERO_SLAB:
            self._arena.hold_state(slab)
        self.states[slot] = slab
        self._append(slot, cells)

    def grow(self, slot: int, num_tokens: int) -> np.ndarray:
        """Cells for so many more tokens of one slot."""
        cells = self._take(num_tokens)
        self._append(slot, cells)
        return cells

    def grow_each(self, slots: np.ndarray) -> np.ndarray:
        """A cell for one more token of each slot; the device's table learns of it in the step."""
        cells = self._take(len(slots))
        self.cells[slots, self.lengths[slots]] = cells
        self.lengths[slots] += 1
        return cells

    def num_new_states(self, slots: np.ndarray) -> int:
        """How many of these slots can not write their state where it is."""
        if not self.keeps_states:
            return 0
        return int(np.count_nonzero(self._arena.is_shared(self.states[slots])))

    def next_states(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the next forward reads and writes these slots' states, int64.

        What slots let go of is free when all have taken theirs: rows of one forward run in any
        order, so none may write what another one reads.
        """
        before = self.states[slots]
        after = before.copy()
        if self.keeps_states:
            places = np.flatnonzero(self._arena.is_shared(before))
            after[places] = [self._arena.take_state() for _ in places]
            for slab in before[places].tolist():
                self._arena.release_state(slab)
            self.states[slots] = after
        return before, after

    def retire(self, slot: int) -> None:
        length = int(self.lengths[slot])
        if self._pools.layout.cell_bytes:
            self._arena.release_cells(self.cells[slot, :length].copy())
        self._arena.release_state(int(self.states[slot]))
        self.lengths[slot] = 0
        self.states[slot] = ZERO_SLAB

    def move(self, new_cells: np.ndarray) -> None:
        for slot in np.flatnonzero(self.lengths).tolist():
            length = int(self.lengths[slot])
            self.cells[slot, :length] = new_cells[self.cells[slot, :length]]
            self._send(slot, 0, length)

    def close(self) -> None:
        self._arena.holders.discard(self)

    def _take(self, num_tokens: int) -> np.ndarray:
        if not self._pools.layout.cell_bytes:
            return np.zeros(num_tokens, np.int32)
        return self._arena.take_cells(num_tokens)

    def _append(self, slot: int, cells: np.ndarray) -> None:
        start = int(self.lengths[slot])
        self.cells[slot, start : start + len(cells)] = cells
        self.lengths[slot] = start + len(cells)
        self._send(slot, start, start + len(cells))

    def _send(self, slot: int, start: int, end: int) -> None:
        if self.table.device.type == "cpu":
            return
        host = torch.from_numpy(self.cells[slot, start:end].copy()).pin_memory()
        self.table[slot, start:end].copy_(host, non_blocking=True)
