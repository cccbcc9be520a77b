"""Which entries of a log there are and in which segment each lies. Reads and writes no file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pippin.cache.disk.segments.segment import Segment, Slot
from pippin.cache.entries.entry import Key
from pippin.cache.entries.entry_index import EntryIndex


class Catalog(EntryIndex[Slot]):
    def __init__(self) -> None:
        super().__init__()
        self._unnoted: list[Slot] = []  # dropped, but not noted in their indexes yet

    def pin(self, keys: Sequence[Key]) -> list[Slot | None]:
        """Where entries lie; their segments stay open until each is unpinned."""
        with self._lock:
            slots = [self._places.get(key) for key in keys]
            for slot in slots:
                if slot is not None:
                    slot.segment.pin()
            return slots

    def add(self, slot: Slot) -> None:
        """An entry that is complete on disk; it replaces one of the same key."""
        with self._lock:
            before = self._places.get(slot.entry.key)
            if before is not None:
                self._drop(before)
            self._places[slot.entry.key] = slot
            slot.segment.add_entry(slot)

    def recall(self, segment: Segment, uses: dict[int, int]) -> None:
        """Uses by offset, from an earlier process."""
        with self._lock:
            for slot in segment.slots.values():
                self._set_use(slot, max(slot.use, uses.get(slot.offset, 0)))
                self.clock = max(self.clock, slot.use)

    def uses(self, segment: Segment) -> dict[int, int]:
        with self._lock:
            return {slot.offset: slot.use for slot in segment.slots.values()}

    def forget(self, keys: Iterable[Key]) -> None:
        with self._lock:
            known = list(keys)
            self._unnoted += [self._places[key] for key in known if key in self._places]
            super().forget(known)

    def lose_damaged(self, slot: Slot) -> None:
        """The index notes it too, or it would be found again."""
        if self.lose(slot, "damaged"):
            with self._lock:
                self._unnoted.append(slot)

    def take_unnoted(self) -> dict[Segment, list[int]]:
        """Offsets of dropped entries, by segment, to be noted in their indexes."""
        with self._lock:
            unnoted, self._unnoted = self._unnoted, []
        offsets: dict[Segment, list[int]] = {}
        for slot in unnoted:
            offsets.setdefault(slot.segment, []).append(slot.offset)
        return offsets

    def _set_use(self, place: Slot, use: int) -> None:
        place.segment.used(place, use)

    def _drop(self, place: Slot) -> None:
        super()._drop(place)
        place.segment.remove_entry(place)
