"""Which entries there are, where they lie and when they were used. Knows no files.

What all threads share, under one lock that is never held while a disk works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from threading import Lock

from pippin.cache.disk.segments.segment import Segment, Slot
from pippin.cache.entries.entry import Entry, Key


class Catalog:
    def __init__(self) -> None:
        self.use = 0  # the store's clock: grows with each use and each entry
        self._slots: dict[Key, Slot] = {}
        self._lost: list[Key] = []
        self._unnoted: list[Slot] = []  # dropped, which their indexes do not know yet
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def entries(self) -> Sequence[Entry]:
        """The longest unused first."""
        with self._lock:
            slots = sorted(self._slots.values(), key=lambda slot: slot.use)
        return [slot.entry for slot in slots]

    def pin(self, keys: Sequence[Key]) -> list[Slot | None]:
        """Where entries lie; their segments stay open until each is unpinned."""
        with self._lock:
            slots = [self._slots.get(key) for key in keys]
            for slot in slots:
                if slot is not None:
                    slot.segment.pin()
            return slots

    def next_use(self) -> int:
        with self._lock:
            self.use += 1
            return self.use

    def add(self, slot: Slot) -> None:
        """An entry that is complete on disk. One of its name that was there before goes."""
        with self._lock:
            before = self._slots.get(slot.entry.key)
            if before is not None:
                before.segment.remove_entry(before)
            self._slots[slot.entry.key] = slot
            slot.segment.add_entry(slot)

    def touch(self, keys: Iterable[Key]) -> None:
        with self._lock:
            for key in keys:
                slot = self._slots.get(key)
                if slot is not None:
                    self.use += 1
                    slot.segment.used(slot, self.use)

    def recall(self, segment: Segment, uses: dict[int, int]) -> None:
        """Uses by offset, from the last time."""
        with self._lock:
            for slot in segment.slots.values():
                segment.used(slot, max(slot.use, uses.get(slot.offset, 0)))
                self.use = max(self.use, slot.use)

    def uses(self, segment: Segment) -> dict[int, int]:
        with self._lock:
            return {slot.offset: slot.use for slot in segment.slots.values()}

    def forget(self, keys: Iterable[Key]) -> None:
        with self._lock:
            for key in keys:
                slot = self._slots.get(key)
                if slot is not None:
                    self._drop(slot)
                    self._unnoted.append(slot)

    def lose(self, slot: Slot, reason: str, *, note: bool = False) -> None:
        """The store gives an entry up, and counts it under `reason`.

        With `note`, its index is to know that: otherwise it would be met again.
        """
        with self._lock:
            if self._slots.get(slot.entry.key) is slot:
                self._drop(slot)
                self._lost.append(slot.entry.key)
                self._counts[reason] += 1
                if note:
                    self._unnoted.append(slot)

    def take_lost(self, limit: int | None = None) -> list[Key]:
        with self._lock:
            lost = self._lost[:limit]
            del self._lost[:limit]
            return lost

    def take_unnoted(self) -> dict[Segment, list[int]]:
        """Offsets of dropped entries, by segment, for the indexes to know."""
        with self._lock:
            unnoted, self._unnoted = self._unnoted, []
        offsets: dict[Segment, list[int]] = {}
        for slot in unnoted:
            offsets.setdefault(slot.segment, []).append(slot.offset)
        return offsets

    def count(self, **more: int) -> None:
        with self._lock:
            self._counts.update(more)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def _drop(self, slot: Slot) -> None:
        del self._slots[slot.entry.key]
        slot.segment.remove_entry(slot)
