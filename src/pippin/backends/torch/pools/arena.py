"""Who holds which cells and state slots. Host arithmetic: it touches no device but to move cells.

Cells and states come out of one memory, so that one byte budget is enough for both: slabs are given
out as a state or as cells, whichever is asked for. Everything is counted by its holders (a request,
an entry of the tree) and is free when the last one lets go. All that the device does with it runs
in the order of launches, on one stream, so what is free here may be handed out again at once.

Where no slab is free although there is room, the cells of the emptiest one move into gaps of others
and whoever holds them is told (`Holder.move`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from pippin.backends.torch.pools.layout import FIRST_SLAB, PoolLayout
from pippin.errors import OutOfMemory


class Holder(Protocol):
    def move(self, new_cells: np.ndarray) -> None:
        """Cell c is now new_cells[c], int32 [num_cells]."""
        ...


class Arena:
    def __init__(
        self,
        layout: PoolLayout,
        num_slabs: int,
        move_cells: Callable[[np.ndarray, np.ndarray], None] = lambda src, dst: None,
    ) -> None:
        self.layout = layout
        self.num_slabs = num_slabs
        self._per_slab = layout.cells_per_slab
        self._move_cells = move_cells  # on the device
        self._cell_refs = np.zeros(num_slabs * self._per_slab, dtype=np.int32)
        self._state_refs = np.zeros(num_slabs, dtype=np.int32)
        self._free = list(range(num_slabs - 1, FIRST_SLAB - 1, -1))
        self._used: dict[int, int] = {}  # cells in use, of each slab that holds cells
        self._open: dict[int, None] = {}  # of these, which have gaps: free cells
        self._num_gaps = 0
        self.holders: set[Holder] = set()

    # ---- cells -----------------------------------------------------------------------------

    def take_cells(self, num_cells: int) -> np.ndarray:
        """int32 [num_cells], each held once."""
        found: list[np.ndarray] = []
        left = num_cells
        while left:
            found.append(self._fill(next(iter(self._open), None) or self._open_slab(), left))
            left -= len(found[-1])
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.zeros(0, np.int32)

    def _open_slab(self) -> int:
        slab = self._take_slab()
        self._used[slab] = 0
        self._open[slab] = None
        self._num_gaps += self._per_slab
        return slab

    def _close_slab(self, slab: int) -> None:
        """Nothing of it is held any more, or what is held is about to move."""
        self._num_gaps -= self._per_slab - self._used.pop(slab)
        self._open.pop(slab, None)

    def _fill(self, slab: int, most: int) -> np.ndarray:
        first = slab * self._per_slab
        refs = self._cell_refs[first : first + self._per_slab]
        places = np.flatnonzero(refs == 0)[:most]
        refs[places] = 1
        self._used[slab] += len(places)
        self._num_gaps -= len(places)
        if self._used[slab] == self._per_slab:
            del self._open[slab]
        return (places + first).astype(np.int32)

    def hold_cells(self, cells: np.ndarray) -> None:
        self._cell_refs[cells] += 1

    def release_cells(self, cells: np.ndarray) -> None:
        """No cell twice."""
        assert (self._cell_refs[cells] > 0).all(), "a cell was released that nobody holds"
        self._cell_refs[cells] -= 1
        freed = cells[self._cell_refs[cells] == 0]
        if not len(freed):
            return
        slabs, counts = np.unique(freed // self._per_slab, return_counts=True)
        for slab, count in zip(slabs.tolist(), counts.tolist(), strict=True):
            self._used[slab] -= count
            self._num_gaps += count
            self._open[slab] = None
            if not self._used[slab]:
                self._close_slab(slab)
                self._free.append(slab)

    # ---- states ----------------------------------------------------------------------------

    def take_state(self) -> int:
        slab = self._take_slab()
        self._state_refs[slab] = 1
        return slab

    def hold_state(self, slab: int) -> None:
        assert slab >= FIRST_SLAB
        assert self._state_refs[slab] > 0
        self._state_refs[slab] += 1

    def release_state(self, slab: int) -> None:
        """Slab 0, the state before the first token, belongs to nobody."""
        if slab < FIRST_SLAB:
            return
        assert self._state_refs[slab] > 0, "a state was released that nobody holds"
        self._state_refs[slab] -= 1
        if not self._state_refs[slab]:
            self._free.append(slab)

    def is_shared(self, slabs: np.ndarray) -> np.ndarray:
        """Of each state, bool: whoever holds it may not write it."""
        shared: np.ndarray = self._state_refs[slabs] != 1
        return shared

    # ---- room ------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        num_states = int(np.count_nonzero(self._state_refs))
        return (
            sum(self._used.values()) * self.layout.cell_bytes + num_states * self.layout.state_bytes
        )

    def make_room(self, num_cells: int, num_states: int) -> None:
        """So that this much can be taken without moving anybody meanwhile."""
        total = self._num_gaps + len(self._free) * self._per_slab
        lacking = num_cells + num_states * self._per_slab > total
        if lacking or num_states > len(self._free) + len(self._open):
            raise OutOfMemory(
                f"the pool of {self.num_slabs:,} slabs has no room for {num_cells:,} tokens and "
                f"{num_states:,} states"
            )
        while len(self._free) < num_states + self._slabs_for(num_cells):
            self._empty_a_slab()

    def _slabs_for(self, num_cells: int) -> int:
        beyond = num_cells - self._num_gaps
        return -(-beyond // self._per_slab) if beyond > 0 else 0

    def _empty_a_slab(self) -> None:
        """Move the cells of the emptiest slab into gaps of others."""
        slab = min(self._open, key=self._used.__getitem__)
        first = slab * self._per_slab
        old = (np.flatnonzero(self._cell_refs[first : first + self._per_slab]) + first).astype(
            np.int32
        )
        self._close_slab(slab)
        new = self.take_cells(len(old))
        self._cell_refs[new] = self._cell_refs[old]
        self._cell_refs[old] = 0
        self._free.append(slab)
        self._move_cells(old, new)
        new_cells = np.arange(len(self._cell_refs), dtype=np.int32)
        new_cells[old] = new
        for holder in self.holders:
            holder.move(new_cells)

    def check_integrity(self) -> None:
        """Count everything again."""
        used = {slab: count for slab, count in self._used.items() if count}
        assert used == self._used
        assert set(self._open) == {slab for slab, count in used.items() if count < self._per_slab}
        assert self._num_gaps == sum(self._per_slab - used[slab] for slab in self._open)
        per_slab = self._cell_refs.reshape(self.num_slabs, -1) if self._per_slab else None
        for slab, count in used.items():
            assert per_slab is not None
            assert np.count_nonzero(per_slab[slab]) == count
        states = set(np.flatnonzero(self._state_refs).tolist())
        free = set(self._free)
        assert len(free) == len(self._free), "a slab is free twice"
        assert len(free | states | set(used)) == len(free) + len(states) + len(used)
        assert len(free) + len(states) + len(used) == self.num_slabs - FIRST_SLAB

    def _take_slab(self) -> int:
        if not self._free:
            raise OutOfMemory("the pool has no slab left")
        return self._free.pop()
