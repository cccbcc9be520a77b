"""A store of entries in memory, for tests: the same verbs, no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pippin.cache.entries import (
    Bytes,
    Destination,
    Entry,
    EntryStore,
    Key,
    Place,
    check_sizes,
)


@dataclass(slots=True, eq=False)
class Copy(Place):
    arrays: tuple[Bytes, ...]


class MemoryStore(EntryStore[Copy]):
    """Keeps copies, and gives up the longest unused when they exceed `max_bytes`."""

    fails = False  # True: the disk is full

    def write(self, entry: Entry, data: Sequence[Bytes]) -> bool:
        check_sizes(entry, data)
        with self._lock:
            if entry.key in self._places:
                return True
            if self.fails or entry.nbytes > self.max_bytes:
                self.count(write_errors=1)
                return False
            while self._counts["bytes"] + entry.nbytes > self.max_bytes:
                self.lose(min(self._places.values(), key=lambda place: place.use), "evicted")
            copies = tuple(part.copy() for part in data)
            self._places[entry.key] = Copy(entry, self.next_use(), copies)
            nbytes = entry.nbytes
            self.count(bytes=nbytes, written=1, written_bytes=nbytes, kept_bytes=nbytes)
            return True

    def read(self, keys: Sequence[Key], into: Sequence[Destination]) -> list[bool]:
        with self._lock:
            found = [self._places.get(key) for key in keys]
        for place, to in zip(found, into, strict=True):
            if place is None:
                self.count(misses=1)
                continue
            self.count(hits=1, read_bytes=place.entry.nbytes)
            for array, part in zip(place.arrays, to, strict=True):
                part[:] = array
        return [place is not None for place in found]

    def _drop(self, place: Copy) -> None:
        super()._drop(place)
        self.count(bytes=-place.entry.nbytes)
