"""A store of entries in memory, for tests: the same verbs, no files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from threading import Lock

from pippin.cache.entries.entry import Bytes, Entry, Key, Loaded
from pippin.cache.entries.entry_store import Destination, StoreCounters, check_sizes


class MemoryStore:
    """Keeps copies, and gives up the longest unused when they exceed `max_bytes`."""

    def __init__(self, fingerprint: bytes, max_bytes: int) -> None:
        self.fingerprint = fingerprint
        self.max_bytes = max_bytes
        self.fails = False  # for tests: the disk is full
        self._kept: dict[Key, Loaded] = {}  # the longest unused first
        self._lost: list[Key] = []
        self._counters = StoreCounters(max_bytes=max_bytes)
        self._lock = Lock()

    def entries(self) -> Sequence[Entry]:
        with self._lock:
            return [kept.entry for kept in self._kept.values()]

    def __contains__(self, key: Key) -> bool:
        with self._lock:
            return key in self._kept

    def write(self, entry: Entry, data: Sequence[Bytes]) -> bool:
        check_sizes(entry, data)
        with self._lock:
            if entry.key in self._kept:
                return True
            if self.fails or entry.nbytes > self.max_bytes:
                self._count(write_errors=1)
                return False
            while self._bytes + entry.nbytes > self.max_bytes:
                oldest = next(iter(self._kept))
                self._drop(oldest)
                self._lost.append(oldest)
                self._count(evicted=1)
            self._kept[entry.key] = Loaded(entry, tuple(part.copy() for part in data))
            self._count(entries=1, bytes=entry.nbytes, written=1)
            self._count(written_bytes=entry.nbytes, kept_bytes=entry.nbytes)
            return True

    def read(
        self, keys: Sequence[Key], into: Sequence[Destination] | None = None
    ) -> list[Loaded | None]:
        with self._lock:
            found = [self._kept.get(key) for key in keys]
            for kept in found:
                if kept is None:
                    self._count(misses=1)
                else:
                    self._count(hits=1, read_bytes=kept.entry.nbytes)
        if into is None:
            return list(found)
        return [kept and _copied(kept, to) for kept, to in zip(found, into, strict=True)]

    def touch(self, keys: Iterable[Key]) -> None:
        with self._lock:
            for key in keys:
                if key in self._kept:
                    self._kept[key] = self._kept.pop(key)

    def forget(self, keys: Iterable[Key]) -> None:
        with self._lock:
            for key in keys:
                if key in self._kept:
                    self._drop(key)

    def take_lost(self, limit: int | None = None) -> list[Key]:
        with self._lock:
            lost = self._lost[:limit]
            del self._lost[:limit]
            return lost

    def flush(self) -> None:
        pass

    def counters(self) -> StoreCounters:
        return self._counters

    def close(self) -> None:
        pass

    @property
    def _bytes(self) -> int:
        return self._counters.bytes

    def _drop(self, key: Key) -> None:
        self._count(entries=-1, bytes=-self._kept.pop(key).entry.nbytes)

    def _count(self, **more: int) -> None:
        now = {name: getattr(self._counters, name) + number for name, number in more.items()}
        self._counters = replace(self._counters, **now)


def _copied(kept: Loaded, to: Destination) -> Loaded:
    for array, part in zip(kept.arrays, to, strict=True):
        part[:] = array
    return Loaded(kept.entry, tuple(to))
