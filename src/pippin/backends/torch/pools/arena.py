"""Which cells and state slots of one memory are in use, and by how many holders.

Cells and states come out of one memory, so that one byte budget is enough for all: slabs are given
out as a state or as cells of a kind, whichever is asked for. Everything is counted by its holders
(a request, an entry of the tree) and is free when the last one releases it. What the device does
with it runs in the order of launches, on one stream, so what is free here may be handed out again
at once.

Where few slabs are free although there is room, cells of the emptiest one move into gaps of others:
so many bytes a step, ahead of need. A step that needs more slabs than are free moves what it must.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from pippin.backends.torch.pools.cells import CellPool
from pippin.backends.torch.pools.layout import FIRST_SLAB, KV_KINDS, PoolLayout
from pippin.errors import OutOfMemory
from pippin.types import Component

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
