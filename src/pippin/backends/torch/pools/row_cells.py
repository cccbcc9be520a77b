"""The cells of each slot, by position, of one kind of layers. Knows no states and no lengths.

    cells of a slot   [ let go | borrowed from the tree | its own ]     held once by the slot
                        behind a window

The table is the classic `req_to_token`: the cell of every position, by slot, for kernels to look
up. On a CPU the device's table is the host's own.
"""

from __future__ import annotations

import numpy as np
import torch

from pippin.backends.torch.pools.memory import Pools
from pippin.types import Component


class RowCells:
    def __init__(
        self, pools: Pools, kind: Component, num_slots: int, max_len: int, window: int = 0
    ) -> None:
        """`window`: tokens that are kept; 0: all. A model may have no layers of the kind."""
        self._pool = pools.arena.cells.get(kind)
        self._index = pools.index
        self.window = window
        self._cells = np.zeros((num_slots + 1, max_len), dtype=np.int32)
        self._firsts = np.zeros(num_slots + 1, dtype=np.int64)  # positions before are let go
        self._ends = np.zeros(num_slots + 1, dtype=np.int64)
        self._per_slab = max(pools.layout.cells_per_slab(kind), 1)
        # bool [slots, slabs]: whose cells the slot may hold. Others' moves do not concern it.
        self._in_slabs = np.zeros((num_slots + 1, pools.arena.num_slabs), dtype=bool)
        host = torch.from_numpy(self._cells)
        on_cpu = pools.device.type == "cpu"
        self.table = host if on_cpu else torch.zeros_like(host, device=pools.device)
        if self._pool is not None:
            self._pool.add_rows(self)

    def held(self, slot: int, start: int, end: int) -> np.ndarray:
        assert self._firsts[slot] <= start or start == end, "these cells were let go"
        return self._cells[slot, start:end]

    def first_held(self, slot: int) -> int:
        return int(self._firsts[slot])

    def first_seen(self, position: int) -> int:
        """Of the positions that the token there sees."""
        return max(0, position - self.window + 1) if self.window else 0

    def borrow(self, slot: int, end: int, cells: np.ndarray) -> None:
        """Begin with what the tree holds of positions up to `end`, read in place."""
        if self._pool is None:
            self._ends[slot] = end
            return
        if self.window:
            cells = cells[-self.window :]
        self._pool.retain(cells)
        self._firsts[slot] = self._ends[slot] = end - len(cells)
        self._append(slot, cells)

    def grow(self, slot: int, num_tokens: int, *, send: bool = True) -> None:
        """`send`: False: the device's table learns of the cells in the step."""
        if self._pool is None:
            self._ends[slot] += num_tokens
        else:
            self._append(slot, self._pool.take(num_tokens), send=send)

    def grow_each(self, slots: np.ndarray, positions: np.ndarray, *, send: bool) -> np.ndarray:
        """The cells of one more token of each slot, int32: those that a rejected draft left, or
        new ones. `send`: as for `grow`."""
        at_end = self._ends[slots] == positions
        if self._pool is not None:
            new = self._pool.take(int(np.count_nonzero(at_end)))
            self._cells[slots[at_end], positions[at_end]] = new
            self._in_slabs[slots[at_end], new // self._per_slab] = True
        self._ends[slots[at_end]] += 1
        cells: np.ndarray = self._cells[slots, positions]
        if send and self.table.device.type != "cpu":
            self.table[*self._index(np.stack([slots, positions]))] = self._index(cells).int()
        return cells

    def reserve(self, slot: int, end: int, *, send: bool) -> None:
        """Cells of all positions before `end`: a row has some already, if drafts were rejected."""
        if (missing := end - int(self._ends[slot])) > 0:
            self.grow(slot, missing, send=send)

    def num_reserved(self, slots: np.ndarray) -> np.ndarray:
        """Positions that have, or had, a cell: int64 [slots]."""
        found: np.ndarray = self._ends[slots]
        return found

    def release_passed(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Of what has fallen behind the window of rows that hold so many tokens at least: forwards
        that read it have been launched."""
        if self._pool is None or not self.window:
            return
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            first = int(self._firsts[slot])
            if first < length - self.window:
                self._pool.release(self._cells[slot, first : length - self.window].copy())
                self._firsts[slot] = length - self.window

    def retire(self, slot: int) -> None:
        if self._pool is not None:
            first, end = int(self._firsts[slot]), int(self._ends[slot])
            self._pool.release(self._cells[slot, first:end].copy())
        self._firsts[slot] = self._ends[slot] = 0
        self._in_slabs[slot] = False

    def move(self, new_cells: np.ndarray, slab: int) -> None:
        for slot in np.flatnonzero(self._in_slabs[:, slab]).tolist():
            first, end = int(self._firsts[slot]), int(self._ends[slot])
            held = self._cells[slot, first:end]
            (places,) = np.nonzero(held // self._per_slab == slab)
            moved = new_cells[held[places]]
            is_moved = moved // self._per_slab != slab
            places, moved = places[is_moved], moved[is_moved]
            self._in_slabs[slot, slab] = not is_moved.all()
            if len(places):
                held[places] = moved
                self._in_slabs[slot, moved // self._per_slab] = True
                self._send(slot, first + int(places[0]), first + int(places[-1]) + 1)

    def _append(self, slot: int, cells: np.ndarray, *, send: bool = True) -> None:
        start = int(self._ends[slot])
        self._cells[slot, start : start + len(cells)] = cells
        self._in_slabs[slot, cells // self._per_slab] = True
        self._ends[slot] = start + len(cells)
        if send:
            self._send(slot, start, start + len(cells))

    def _send(self, slot: int, start: int, end: int) -> None:
        if self.table.device.type == "cpu":
            return
        host = torch.from_numpy(self._cells[slot, start:end].copy()).pin_memory()
        self.table[slot, start:end].copy_(host, non_blocking=True)
