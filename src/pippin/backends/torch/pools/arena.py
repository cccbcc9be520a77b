"""Which cells and state slots of one memory are in use, and by how many holders.

Cells and states come out of one memory, so that one byte budget is enough for all: slabs are given
out as a state or as cells of a kind, whichever is asked for. Everything is counted by its holders
(a request, an entry of the tree) and is free when the last one releases it. What the device does
with it runs in the order of launches, on one stream, so what is free here may be handed out again
at once.

Where few slabs are free although there is room, cells of the emptiest one move into gaps of others:
so many bytes a step, ahead of need. A step that needs more slabs than are free moves what it must.

A cell is one token's keys and values, in all layers of a kind; a slab of them is taken when it is
needed, and goes back when its last cell is free. A slab is emptied a few cells at a time: between
two moves it gives out none, and its holders may use and release what they hold there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from pippin.backends.torch.pools.layout import FIRST_SLAB, KV_KINDS, PoolLayout
from pippin.errors import OutOfMemory
from pippin.types import Component


class Holder(Protocol):
    def move(self, new_cells: np.ndarray) -> None:
        """Cell c is now new_cells[c], int32 [num_cells]: an array that is not to be kept."""
        ...


class Rows(Protocol):
    def move(self, new_cells: np.ndarray, slab: int) -> None:
        """The same, of cells of one slab."""
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
        self._num_gaps = 0  # in open slabs
        self._emptied: int | None = None  # a slab whose cells move away; it is not open
        self._rows: list[Rows] = []  # hold cells of any slab
        self._holders: dict[int, dict[Holder, None]] = {}  # the other holders, by slab
        self._new_cells = np.zeros(0, np.int32)  # each cell's own number, from the first move on

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

    def retain(self, cells: np.ndarray) -> None:
        self._refs[cells] += 1

    def release(self, cells: np.ndarray) -> None:
        """No cell twice."""
        assert (self._refs[cells] > 0).all(), "a cell was released that has no holder"
        self._refs[cells] -= 1
        freed = cells[self._refs[cells] == 0]
        if not len(freed):
            return
        counts = np.bincount(freed // self._per_slab)
        slabs = np.flatnonzero(counts)
        for slab, count in zip(slabs.tolist(), counts[slabs].tolist(), strict=True):
            self._used[slab] -= count
            if slab != self._emptied:
                self._num_gaps += count
                self._open[slab] = None
            if not self._used[slab]:
                self._give_back(slab)

    def slabs_for(self, num_cells: int) -> int:
        """How many more slabs it takes to have so many cells."""
        return -(-max(0, num_cells - self._num_gaps) // self._per_slab)

    def add_rows(self, rows: Rows) -> None:
        """Notified of every move."""
        self._rows.append(rows)

    def drop_rows(self) -> None:
        self._rows.clear()

    def add_holder(self, holder: Holder, cells: np.ndarray) -> None:
        """Notified of moves of these cells, until it is dropped with the same ones."""
        for slab in self._slabs_of(cells):
            self._holders.setdefault(slab, {})[holder] = None

    def drop_holder(self, holder: Holder, cells: np.ndarray) -> None:
        for slab in self._slabs_of(cells):
            del self._holders[slab][holder]
            if not self._holders[slab]:
                del self._holders[slab]

    def _slabs_of(self, cells: np.ndarray) -> list[int]:
        """Cells of one slab mostly follow each other: each run of them counts once."""
        slabs = cells // self._per_slab
        begins = np.flatnonzero(slabs[1:] != slabs[:-1]) + 1
        return list(dict.fromkeys([*slabs[:1].tolist(), *slabs[begins].tolist()]))

    @property
    def is_emptying(self) -> bool:
        return self._emptied is not None

    def can_spare_a_slab(self, num_cells: int = 0) -> bool:
        """Whether its gaps, but for so many that are wanted, have room for a slab's cells."""
        return self._num_gaps - num_cells >= self._per_slab

    def empty_a_slab(self) -> None:
        """The emptiest one, at once."""
        self.keep_slab()
        self.start_emptying()
        self.empty_further(self._per_slab)

    def start_emptying(self) -> None:
        """The emptiest slab gives out no cells from now on."""
        assert self._emptied is None
        slab = min(self._open, key=self._used.__getitem__)
        self._num_gaps -= self._per_slab - self._used[slab]
        del self._open[slab]
        self._emptied = slab

    def keep_slab(self) -> None:
        """The slab that was being emptied, if there is one, gives out cells again."""
        if (slab := self._emptied) is not None:
            self._emptied = None
            self._num_gaps += self._per_slab - self._used[slab]
            if self._used[slab] < self._per_slab:
                self._open[slab] = None

    def empty_further(self, most_cells: int) -> int:
        """Move so many cells at most into gaps of other slabs, and notify their holders.

        Returns how many were moved; none, and the slab is kept, where the others have no room.
        """
        slab = self._emptied
        assert slab is not None
        first = slab * self._per_slab
        held = np.flatnonzero(self._refs[first : first + self._per_slab])[:most_cells]
        if len(held) > self._num_gaps:
            self.keep_slab()
            return 0
        old = (held + first).astype(np.int32)
        new = self.take(len(old))
        self._refs[new] = self._refs[old]
        self._refs[old] = 0
        self._used[slab] -= len(old)
        self._move_cells(old, new)
        if not len(self._new_cells):
            self._new_cells = np.arange(len(self._refs), dtype=np.int32)
        self._new_cells[old] = new
        for rows in self._rows:
            rows.move(self._new_cells, slab)
        for holder in tuple(self._holders.get(slab, ())):
            holder.move(self._new_cells)
        self._new_cells[old] = old
        if not self._used[slab]:
            self._give_back(slab)
        return len(old)

    def check_integrity(self) -> None:
        by_slab = np.count_nonzero(self._refs.reshape(self._num_slabs, -1), axis=1)
        used = {slab: int(by_slab[slab]) for slab in np.flatnonzero(by_slab).tolist()}
        assert used == self._used
        gaps = {slab: self._per_slab - count for slab, count in used.items()}
        gaps.pop(self._emptied or 0, None)
        assert set(self._open) == {slab for slab, count in gaps.items() if count}
        assert self._num_gaps == sum(gaps.values())
        assert set(self._holders) <= set(used)

    def _open_slab(self) -> int:
        slab = self._take_slab()
        self._used[slab] = 0
        self._open[slab] = None
        self._num_gaps += self._per_slab
        return slab

    def _give_back(self, slab: int) -> None:
        """Nothing of it is held any more."""
        if slab == self._emptied:
            self._emptied = None
        else:
            self._num_gaps -= self._per_slab
            del self._open[slab]
        del self._used[slab]
        self._free_slab(slab)

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


SLABS_TO_KEEP_FREE = 16  # as far as gaps allow: about as many states as a step begins
MOST_MOVED_BYTES = 16 << 20  # ahead of need, by one step

Move = Callable[[Component, np.ndarray, np.ndarray], None]  # cells of a kind: from, to


class Arena:
    def __init__(
        self, layout: PoolLayout, num_slabs: int, move_cells: Move = lambda kind, src, dst: None
    ) -> None:
        self.layout = layout
        self.num_slabs = num_slabs
        self._state_refs = np.zeros(num_slabs, dtype=np.int32)
        self._free = list(range(num_slabs - 1, FIRST_SLAB - 1, -1))
        self.cells = {
            kind: self._cell_pool(kind, move_cells) for kind in KV_KINDS if layout.cell_bytes(kind)
        }

    def _cell_pool(self, kind: Component, move_cells: Move) -> CellPool:
        return CellPool(
            self.num_slabs,
            self.layout.cells_per_slab(kind),
            self._take_slab,
            self._free.append,
            lambda old, new: move_cells(kind, old, new),
        )

    def take_state(self) -> int:
        slab = self._take_slab()
        self._state_refs[slab] = 1
        return slab

    def hold_state(self, slab: int) -> None:
        assert slab >= FIRST_SLAB
        assert self._state_refs[slab] > 0
        self._state_refs[slab] += 1

    def release_state(self, slab: int) -> None:
        """Slab 0, the state before the first token, is not counted."""
        if slab < FIRST_SLAB:
            return
        assert self._state_refs[slab] > 0, "a state was released that has no holder"
        self._state_refs[slab] -= 1
        if not self._state_refs[slab]:
            self._free.append(slab)

    def is_shared(self, slabs: np.ndarray) -> np.ndarray:
        """Of each state, bool: its holders may not write it."""
        shared: np.ndarray = self._state_refs[slabs] != 1
        return shared

    @property
    def used_bytes(self) -> int:
        num_states = int(np.count_nonzero(self._state_refs))
        in_cells = sum(
            pool.num_used * self.layout.cell_bytes(kind) for kind, pool in self.cells.items()
        )
        return in_cells + num_states * self.layout.state_bytes

    def make_room(self, num_tokens: int, num_states: int) -> None:
        """So that this much can be taken without moving cells meanwhile: cells of every kind."""
        self.make_room_for(dict.fromkeys(self.cells, num_tokens), num_states)

    def make_room_for(self, num_cells: Mapping[Component, int], num_states: int) -> None:
        """The same, with so many cells of each kind."""
        wanted = [(pool, num_cells.get(kind, 0)) for kind, pool in self.cells.items()]
        while len(self._free) < num_states + sum(pool.slabs_for(num) for pool, num in wanted):
            for pool in self.cells.values():
                pool.keep_slab()
            if len(self._free) >= num_states + sum(pool.slabs_for(num) for pool, num in wanted):
                return
            spare = next((pool for pool, num in wanted if pool.can_spare_a_slab(num)), None)
            if spare is None:
                most = max(num for _, num in wanted) if wanted else 0
                raise OutOfMemory(
                    f"the pool of {self.num_slabs:,} slabs has no room for {most:,} tokens "
                    f"and {num_states:,} states"
                )
            spare.empty_a_slab()

    def compact(self, most_bytes: int) -> int:
        """Ahead of need: move so many bytes at most, so that slabs are free. Returns how many.

        Cells of one kind alone fill each other's gaps, and need none.
        """
        if not self.layout.num_recurrent_layers and len(self.cells) < 2:
            return 0
        moved = 0
        for kind, pool in self.cells.items():
            nbytes = self.layout.cell_bytes(kind)
            while (most := (most_bytes - moved) // nbytes) > 0:
                if not pool.is_emptying:
                    if len(self._free) >= SLABS_TO_KEEP_FREE or not pool.can_spare_a_slab():
                        break
                    pool.start_emptying()
                moved += pool.empty_further(most) * nbytes
        return moved

    def check_integrity(self) -> None:
        owners = [set(np.flatnonzero(self._state_refs).tolist()), set(self._free)]
        assert len(owners[1]) == len(self._free), "a slab is free twice"
        for pool in self.cells.values():
            pool.check_integrity()
            owners.append(pool.slabs)
        num_owned = sum(len(owned) for owned in owners)
        assert len(set().union(*owners)) == num_owned, "a slab belongs to two"
        assert num_owned == self.num_slabs - FIRST_SLAB

    def _take_slab(self) -> int:
        if not self._free:
            raise OutOfMemory("the pool has no slab left")
        return self._free.pop()
