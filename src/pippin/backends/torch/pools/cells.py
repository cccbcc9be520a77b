"""Cells of one size: who holds which. Host arithmetic: it touches no device but to move cells.

A cell is one token's keys and values, in all layers of a kind. Cells lie in slabs of the memory
that all kinds and the states share: a slab is taken from the free ones when it is needed, and goes
back when its last cell is free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np


class Holder(Protocol):
    def move(self, new_cells: np.ndarray) -> None:
        """Cell c is now new_cells[c], int32 [num_cells]."""
        ...


MoveCells = Callable[[np.ndarray, np.ndarray], None]  # on the device: from, to


class CellPool:
    def __init__(
        self,
        num_slabs: int,
        per_slab: int,
        take_slab: Callable[[], int],
        free_slab: Callable[[int], None],
        move_cells: MoveCells,
    ) -> None:
        self._num_slabs = num_slabs
        self._per_slab = per_slab
        self._take_slab = take_slab
        self._free_slab = free_slab
        self._move_cells = move_cells
        self._refs = np.zeros(num_slabs * per_slab, dtype=np.int32)
        self._used: dict[int, int] = {}  # cells in use, of each slab that holds some
        self._open: dict[int, None] = {}  # of these, which have gaps: free cells
        self._num_gaps = 0
        self.holders: set[Holder] = set()

    @property
    def num_used(self) -> int:
        return sum(self._used.values())

    @property
    def slabs(self) -> set[int]:
        return set(self._used)

    def take(self, num_cells: int) -> np.ndarray:
        """int32 [num_cells], each held once."""
        found: list[np.ndarray] = []
        left = num_cells
        while left:
            found.append(self._fill(next(iter(self._open), None) or self._open_slab(), left))
            left -= len(found[-1])
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.zeros(0, np.int32)

    def hold(self, cells: np.ndarray) -> None:
        self._refs[cells] += 1

    def release(self, cells: np.ndarray) -> None:
        """No cell twice."""
        assert (self._refs[cells] > 0).all(), "a cell was released that nobody holds"
        self._refs[cells] -= 1
        freed = cells[self._refs[cells] == 0]
        if not len(freed):
            return
        slabs, counts = np.unique(freed // self._per_slab, return_counts=True)
        for slab, count in zip(slabs.tolist(), counts.tolist(), strict=True):
            self._used[slab] -= count
            self._num_gaps += count
            self._open[slab] = None
            if not self._used[slab]:
                self._close_slab(slab)
                self._free_slab(slab)

    def slabs_for(self, num_cells: int) -> int:
        """How many more slabs it takes to have so many cells."""
        return -(-max(0, num_cells - self._num_gaps) // self._per_slab)

    def can_spare_a_slab(self, num_cells: int) -> bool:
        """Whether its gaps, but for so many that are wanted, have room for a slab's cells."""
        return self._num_gaps - num_cells >= self._per_slab

    def empty_a_slab(self) -> None:
        """Move the cells of the emptiest slab into gaps of others, and tell whoever holds them."""
        slab = min(self._open, key=self._used.__getitem__)
        first = slab * self._per_slab
        old = (np.flatnonzero(self._refs[first : first + self._per_slab]) + first).astype(np.int32)
        self._close_slab(slab)
        new = self.take(len(old))
        self._refs[new] = self._refs[old]
        self._refs[old] = 0
        self._free_slab(slab)
        self._move_cells(old, new)
        new_cells = np.arange(len(self._refs), dtype=np.int32)
        new_cells[old] = new
        for holder in self.holders:
            holder.move(new_cells)

    def check_integrity(self) -> None:
        """Count everything again."""
        by_slab = np.count_nonzero(self._refs.reshape(self._num_slabs, -1), axis=1)
        used = {slab: int(by_slab[slab]) for slab in np.flatnonzero(by_slab).tolist()}
        assert used == self._used
        assert set(self._open) == {slab for slab, count in used.items() if count < self._per_slab}
        assert self._num_gaps == sum(self._per_slab - used[slab] for slab in self._open)

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
        refs = self._refs[first : first + self._per_slab]
        places = np.flatnonzero(refs == 0)[:most]
        refs[places] = 1
        self._used[slab] += len(places)
        self._num_gaps -= len(places)
        if self._used[slab] == self._per_slab:
            del self._open[slab]
        return (places + first).astype(np.int32)
