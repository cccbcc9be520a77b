"""The store of entries in the host's memory: all its verbs, over areas. Knows no tree, no device.

memory    all of it is allocated when the store is made, in areas of a sixteenth or less: pinning
          memory takes long, and too little of it is an error at once
room      is made in the area whose entries were used longest ago, on average: those used no later
          than that are evicted, and the others close the gaps
threads   one writes at a time; any may read, touch, forget and count. A read waits while entries
          move where it reads; nothing else waits
damage    XXH3 over every block, checked at every read: what does not verify is dropped and counted
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from threading import Condition
from typing import NamedTuple

import numpy as np
import xxhash

from pippin.cache.entries.blocks import Workers, divided
from pippin.cache.entries.entry import Bytes, Entry, Key, Loaded
from pippin.cache.entries.entry_store import Destination, StoreCounters, check_sizes
from pippin.cache.host.areas import Area, Kept, aligned

NUM_AREAS = 16  # at least, where entries are small enough
MOST_AREA_BYTES = 256 << 20
NUM_THREADS = 4


class PinnedEntry(NamedTuple):
    """An entry that stays where it is until `unpin`, which is called once."""

    loaded: Loaded
    unpin: Callable[[], None]


class HostStore:
    fingerprint = b"of this process"

    def __init__(self, max_bytes: int, allocate: Callable[[int], Bytes], entry_bytes: int) -> None:
        """`entry_bytes`: of the largest entry. Raises what `allocate` raises."""
        size = area_bytes(max_bytes, entry_bytes)
        self._areas = [Area(allocate(size)) for _ in range(max_bytes // size)]
        self._places: dict[Key, Area] = {}
        self._lost: list[Key] = []
        self._uses = itertools.count(1)
        self._counters = StoreCounters(max_bytes=max_bytes)
        self._lock = Condition()
        self._workers = Workers("pippin-host-read", NUM_THREADS)

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
        at = kept.at
        for block in divided(data):
            begin = at
            for part in block.parts:
                area.memory[at : at + len(part)] = np.frombuffer(part, np.uint8)
                at += len(part)
            kept.digests.append(_digest(area.memory[begin:at]))
        with self._lock:
            area.add(kept)
            self._places[entry.key] = area
        nbytes = entry.nbytes
        self._count(entries=1, bytes=nbytes, written=1, written_bytes=nbytes, kept_bytes=nbytes)
        return True

    def _make_room(self, nbytes: int) -> Area | None:
        """An area with `nbytes` of room at its end; None while all areas are being read."""
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
            copies: list[tuple[Bytes, Bytes]] = []
            loaded: list[Loaded | None] = []
            for number, pinned in enumerate(pinned_entries):
                if pinned is None:
                    loaded.append(None)
                    continue
                entry, sources = pinned.loaded.entry, pinned.loaded.arrays
                to = entry.new_buffers() if into is None else into[number]
                copies += zip(to, sources, strict=True)
                loaded.append(Loaded(entry, tuple(to)))
            self._workers.map(_copy, copies, sum(to.nbytes for to, _ in copies))
        finally:
            for pinned in pinned_entries:
                if pinned is not None:
                    pinned.unpin()
        return loaded

    def pin(self, key: Key) -> PinnedEntry | None:
        """An entry, verified, where it lies."""
        with self._lock:
            while (area := self._places.get(key)) is not None and area.moving:
                self._lock.wait()
            if area is None:
                self._count(misses=1)
                return None
            area.num_readers += 1
            kept = area.kept[key]

        def unpin() -> None:
            with self._lock:
                area.num_readers -= 1

        if self._workers.map(_digest, area.blocks(kept), kept.entry.nbytes) != kept.digests:
            unpin()
            self._give_up(key)
            self._count(misses=1)
            return None
        self._count(hits=1, read_bytes=kept.entry.nbytes)
        return PinnedEntry(Loaded(kept.entry, area.arrays(kept)), unpin)

    def _give_up(self, key: Key) -> None:
        """Drop an entry that did not verify."""
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

    def flush(self) -> None:
        """Nothing here outlives the process."""

    def counters(self) -> StoreCounters:
        return self._counters

    def close(self) -> None:
        self._workers.close()
        self._places.clear()
        self._areas.clear()

    def _drop(self, key: Key) -> None:
        kept = self._places.pop(key).kept.pop(key)
        self._count(entries=-1, bytes=-kept.entry.nbytes)

    def _count(self, **more: int) -> None:
        with self._lock:  # this thread may have it already
            now = {name: getattr(self._counters, name) + number for name, number in more.items()}
            self._counters = replace(self._counters, **now)


def area_bytes(max_bytes: int, entry_bytes: int) -> int:
    """A power of two: pinned memory is allocated in these. Raises ValueError if none fits."""
    least = 1 << max(aligned(entry_bytes) - 1, 1).bit_length()
    if max_bytes < least:
        raise ValueError(f"{max_bytes:,} bytes hold no entry: use {least:,} or more")
    most = 1 << (max(max_bytes // NUM_AREAS, 1).bit_length() - 1)
    return max(least, min(most, MOST_AREA_BYTES))


def _copy(copy: tuple[Bytes, Bytes]) -> None:
    to, source = copy
    to[:] = source


def _digest(data: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(data.data)
