"""The request pool: slot s in 1..N is a request's identity for its whole life."""

from __future__ import annotations

import heapq


class SlotPool:
    """The lowest free slot is acquired first, so that rows stay dense. Row 0 is padding."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(1, num_slots + 1))
        self._taken: set[int] = set()

    def acquire(self) -> int:
        slot = heapq.heappop(self._free)
        self._taken.add(slot)
        return slot

    def release(self, slot: int) -> None:
        self._taken.remove(slot)
        heapq.heappush(self._free, slot)

    @property
    def num_free(self) -> int:
        return len(self._free)
