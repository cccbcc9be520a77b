"""What each slot holds: its cells of each kind, by position, and its state slot.

    cells of a slot   [ let go | borrowed from the tree | its own ]     held once by the slot
                        behind a window
    state of a slot   read where it is; written there too, unless it has another holder:
                      then the next forward reads it there and writes another one
    length            between two bounds, while it is not known how many drafts were accepted; cells
                      are taken for the upper one. The state is that before the accepted drafts.

The table is the classic `req_to_token`: the cell of every position, by slot, for kernels to look
up. On a CPU the device's table is the host's own.
"""

from __future__ import annotations

import numpy as np
import torch

from pippin.backends.torch.pools.layout import ZERO_SLAB
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
