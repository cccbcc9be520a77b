"""The store of entries in the host's memory: all its verbs, over areas. Knows no tree, no device.

memory    all of it is taken when the store is made, in areas of a sixteenth or less: to pin memory
          takes long, and a machine that has too little says so at once
room      is made in the area whose entries were used longest ago, on average: those used no later
          than that go, and the others move together
threads   one writes at a time; any may read, touch, forget and count. A read waits for room that is
          being made where it reads, nobody else waits for anything
damage    XXH3 over every block, checked at every read: what does not verify is dropped and counted
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Condition
from typing import NamedTuple, TypeVar

import numpy as np
import xxhash

from pippin.cache.entries.entry import Bytes, Entry, Key, Loaded
from pippin.cache.entries.entry_store import Destination, StoreCounters, as_loaded, check_sizes
from pippin.cache.host.areas import Area, Kept, aligned, blocks

NUM_AREAS = 16  # at least, where entries are small enough
MOST_AREA_BYTES = 256 << 20
NUM_THREADS = 4
ALONE_BYTES = 1 << 20  # less than this is copied by the caller

T = TypeVar("T")
R = TypeVar("R")


class Copy(NamedTuple):
    source: Bytes
    to: Bytes


class PinnedEntry(NamedTuple):
    """An entry that stays where it is until it is given back, once."""

    loaded: Loaded
    unpin: Callable[[], None]


class HostStore:
    fingerprint = b"of this process"

    def __init__(self, max_bytes: int, allocate: Callable[[int], Bytes], entry_bytes: int) -> None:
        """`entry_bytes`: of the largest entry that may come. Raises what `allocate` raises."""
        size = area_bytes(max_bytes, entry_bytes)
        self._areas = [Area(allocate(size)) for _ in range(max_bytes // size)]
        self._places: dict[Key, Area] = {}
        self._lost: list[Key] = []
        self._uses = itertools.count(1)
        self._counters = StoreCounters(max_bytes=max_bytes)
        self._lock = Condition()
        workers = min(NUM_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="pippin-host-read")

    def entries(self) -> Sequence[Entry]:
        with self._lock:
            kept = [kept for area in self._areas for kept in area.kept.values()]
            return [one.entry for one in sorted(kept, key=lambda one: one.used)]

    def __contains__(self, key: Key) -> bool:
        with self._lock:
            return key in self._places

    # ---- writing ---------------------------------------------------------------------------

    def write(self, entry: Entry, data: Sequence[Bytes]) -> bool:
        check_sizes(entry, data)
        if entry.key in self:
            return True
        area = self._make_room(entry.nbytes)
        if area is None:
            self._count(write_errors=1)
            return False
        kept = Kept(entry, area.end, [], next(self._uses))
        for block in blocks(entry):
            to = area.view(kept, block)
            to[:] = data[block.array].reshape(-1).view(np.uint8)[block.start : block.stop]
            kept.digests.append(_digest(to))
        with self._lock:
            area.add(kept)
            self._places[entry.key] = area
        nbytes = entry.nbytes
        self._count(entries=1, bytes=nbytes, written=1, written_bytes=nbytes, kept_bytes=nbytes)
        return True

    def _make_room(self, nbytes: int) -> Area | None:
        """An area with so much room at its end; None while everything there is is being read."""
        while True:
            with self._lock:
                area = next((area for area in self._areas if area.has_room(nbytes)), None)
                if area is not None:
                    return area
                area = self._area_to_tidy(nbytes)
                if area is None:
                    return None
                while not area.has_gaps(nbytes):
                    self._evict(area, area.unused_longest())
                area.moving = True
                moves = area.moves()
            for kept, at in moves:
                area.move(kept, at)
            with self._lock:
                area.note_moves(moves)
                area.moving = False
                self._lock.notify_all()

    def _evict(self, area: Area, keys: Sequence[Key]) -> None:
        """Counted at once: the engine's thread may wait for the lock."""
        dropped = [area.kept.pop(key) for key in keys]
        for key in keys:
            del self._places[key]
        self._lost += keys
        nbytes = sum(kept.entry.nbytes for kept in dropped)
        self._count(evicted=len(keys), entries=-len(keys), bytes=-nbytes)

    def _area_to_tidy(self, nbytes: int) -> Area | None:
        free = [area for area in self._areas if not area.num_readers and area.size >= nbytes]
        gaping = [area for area in free if area.has_gaps(nbytes)]
        return min(gaping or free, key=lambda area: area.last_use, default=None)

    # ---- reading ---------------------------------------------------------------------------

    def read(
        self, keys: Sequence[Key], into: Sequence[Destination] | None = None
    ) -> list[Loaded | None]:
        pinned_entries = [self.pin(key) for key in keys]
        try:
            copies: list[Copy] = []
            loaded: list[Loaded | None] = []
            for number, pinned in enumerate(pinned_entries):
                if pinned is None:
                    loaded.append(None)
                    continue
                entry = pinned.loaded.entry
                to = _new_destination(entry) if into is None else into[number]
                sources = [array.data for array in pinned.loaded.arrays]
                copies += [Copy(*pair) for pair in zip(sources, to, strict=True)]
                loaded.append(as_loaded(entry, to))
            self._spread(_copy, copies, sum(copy.to.nbytes for copy in copies))
        finally:
            for pinned in pinned_entries:
                if pinned is not None:
                    pinned.unpin()
        return loaded

    def pin(self, key: Key) -> PinnedEntry | None:
        """An entry, verified, where it lies."""
        found = self._pin(key)
        if found is None:
            self._count(misses=1)
            return None
        area, kept = found
        views = [area.view(kept, block) for block in blocks(kept.entry)]
        if self._spread(_digest, views, kept.entry.nbytes) != kept.digests:
            self._unpin([found])
            self._give_up(key)
            self._count(misses=1)
            return None
        self._count(hits=1, read_bytes=kept.entry.nbytes)
        return PinnedEntry(as_loaded(kept.entry, area.arrays(kept)), lambda: self._unpin([found]))

    def _spread(self, work: Callable[[T], R], parts: Sequence[T], nbytes: int) -> list[R]:
        """Over a few threads, where it is much."""
        if len(parts) < 2 or nbytes < ALONE_BYTES:
            return [work(part) for part in parts]
        return list(self._pool.map(work, parts))

    def _pin(self, key: Key) -> tuple[Area, Kept] | None:
        with self._lock:
            while (area := self._places.get(key)) is not None and area.moving:
                self._lock.wait()
            if area is None:
                return None
            area.num_readers += 1
            return area, area.kept[key]

    def _unpin(self, pinned: Sequence[tuple[Area, Kept] | None]) -> None:
        with self._lock:
            for found in pinned:
                if found is not None:
                    found[0].num_readers -= 1

    def _give_up(self, key: Key) -> None:
        """It is not what was written."""
        with self._lock:
            if key in self._places:
                self._drop(key)
                self._lost.append(key)
                self._count(damaged=1)

    # ---- the rest --------------------------------------------------------------------------

    def touch(self, keys: Iterable[Key]) -> None:
        with self._lock:
            for key in keys:
                if (area := self._places.get(key)) is not None:
                    area.kept[key].used = next(self._uses)

    def forget(self, keys: Iterable[Key]) -> None:
        with self._lock:
            for key in keys:
                if key in self._places:
                    self._drop(key)

    def take_lost(self, limit: int | None = None) -> list[Key]:
        with self._lock:
            lost = self._lost[:limit]
            del self._lost[:limit]
            return lost

    def clear(self) -> None:
        self.forget([entry.key for entry in self.entries()])

    def flush(self) -> None:
        """It does not last."""

    def counters(self) -> StoreCounters:
        return self._counters

    def close(self) -> None:
        self._pool.shutdown()
        self._places.clear()
        self._areas.clear()

    def _drop(self, key: Key) -> None:
        kept = self._places.pop(key).kept.pop(key)
        self._count(entries=-1, bytes=-kept.entry.nbytes)

    def _count(self, **more: int) -> None:
        with self._lock:  # it may be held already: by the same thread
            now = {name: getattr(self._counters, name) + number for name, number in more.items()}
            self._counters = replace(self._counters, **now)


def area_bytes(max_bytes: int, entry_bytes: int) -> int:
    """A power of two: pinned memory is given out in these. Raises ValueError if it does not fit."""
    least = 1 << max(aligned(entry_bytes) - 1, 1).bit_length()
    if max_bytes < least:
        raise ValueError(f"{max_bytes:,} bytes hold no entry: {least:,} do")
    most = 1 << (max(max_bytes // NUM_AREAS, 1).bit_length() - 1)
    return max(least, min(most, MOST_AREA_BYTES))


def _copy(copy: Copy) -> None:
    copy.to[:] = copy.source


def _digest(data: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(data.data)


def _new_destination(entry: Entry) -> Destination:
    return [np.empty(spec.nbytes, np.uint8) for spec in entry.arrays]
