"""Which entries a store has, when they were used, and which it lost. Knows no files and no memory.

Shared by all threads, under one lock that is never held while bytes are read or written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from threading import Condition
from typing import Generic, Protocol, TypeVar

from pippin.cache.entries.entry import Entry, Key


class EntryPlace(Protocol):
    """Where an entry lies; `use` is the store's clock at its last use."""

    @property
    def entry(self) -> Entry: ...

    use: int


Place = TypeVar("Place", bound=EntryPlace)


class EntryIndex(Generic[Place]):
    def __init__(self) -> None:
        self.clock = 0  # grows with each use and each entry
        self._places: dict[Key, Place] = {}
        self._lost: list[Key] = []
        self._counts: Counter[str] = Counter()
        self._lock = Condition()

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def entries(self) -> Sequence[Entry]:
        """The longest unused first."""
        with self._lock:
            places = sorted(self._places.values(), key=lambda place: place.use)
        return [place.entry for place in places]

    def next_use(self) -> int:
        with self._lock:
            self.clock += 1
            return self.clock

    def touch(self, keys: Iterable[Key]) -> None:
        with self._lock:
            for key in keys:
                place = self._places.get(key)
                if place is not None:
                    self._set_use(place, self.next_use())

    def forget(self, keys: Iterable[Key]) -> None:
        with self._lock:
            for key in keys:
                place = self._places.get(key)
                if place is not None:
                    self._drop(place)

    def lose(self, place: Place, reason: str) -> bool:
        """Drop an entry that the store cannot keep, counted as `reason`; False if it was dropped
        before."""
        with self._lock:
            key = place.entry.key
            if self._places.get(key) is not place:
                return False
            self._drop(place)
            self._lost.append(key)
            self._counts[reason] += 1
            return True

    def take_lost(self, limit: int | None = None) -> list[Key]:
        with self._lock:
            lost = self._lost[:limit]
            del self._lost[:limit]
            return lost

    def count(self, **more: int) -> None:
        with self._lock:
            self._counts.update(more)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def _set_use(self, place: Place, use: int) -> None:
        place.use = use

    def _drop(self, place: Place) -> None:
        del self._places[place.entry.key]
