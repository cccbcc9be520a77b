"""Entries in the host's memory, in areas that are filled from their beginnings.

    [ entry | entry | gap | entry | gap | entry | room ]
                                                end

An entry lies in one piece. Gaps are where entries were; `HostStore._make_room` closes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash

from pippin.cache import entries as blocks
from pippin.cache.entries import (
    Bytes,
    Destination,
    Entry,
    EntryStore,
    Key,
    Place,
    Workers,
    check_sizes,
    divided,
)

ALIGNMENT = 256


@dataclass(slots=True, eq=False)
class Kept(Place):
    area: Area
    at: int
    digests: list[int] = field(default_factory=list)  # of each block

    @property
    def nbytes(self) -> int:
        return aligned(self.entry.nbytes)


@dataclass(eq=False)
class Area:
    memory: Bytes
    kept: dict[Key, Kept] = field(default_factory=dict)  # in the order of their places
    end: int = 0
    num_readers: int = 0
    moving: bool = False  # entries close gaps: no read may start here

    @property
    def last_use(self) -> float:
        """On average."""
        return sum(kept.use for kept in self.kept.values()) / max(len(self.kept), 1)

    def has_gaps(self, nbytes: int) -> bool:
        """Whether `nbytes` fit once gaps are closed."""
        kept_bytes = sum(kept.nbytes for kept in self.kept.values())
        return kept_bytes + aligned(nbytes) <= self.memory.nbytes

    def blocks(self, kept: Kept) -> list[Bytes]:
        """The bytes of an entry, in blocks as `divided` makes them."""
        end, size = kept.at + kept.entry.nbytes, blocks.BLOCK_BYTES
        return [self.memory[at : min(at + size, end)] for at in range(kept.at, end, size)]

    def arrays(self, kept: Kept) -> tuple[Bytes, ...]:
        """Of the whole entry."""
        ends = itertools.accumulate((spec.nbytes for spec in kept.entry.arrays), initial=kept.at)
        return tuple(self.memory[at:end] for at, end in itertools.pairwise(ends))

    def unused_longest(self) -> list[Kept]:
        """Those used no later than the average: at least one, where there are any."""
        average = self.last_use
        return [kept for kept in self.kept.values() if kept.use <= average]

    def close_gaps(self, kept: Sequence[Kept]) -> list[int]:
        """Move the bytes of its entries, each over what was moved before; returns their places."""
        ends = list(itertools.accumulate((one.nbytes for one in kept), initial=0))
        for one, at in zip(kept, ends, strict=False):
            if at != one.at:
                nbytes = one.entry.nbytes
                self.memory[at : at + nbytes] = self.memory[one.at : one.at + nbytes]
        return ends


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


NUM_AREAS = 16  # at least, where entries are small enough
MOST_AREA_BYTES = 256 << 20
NUM_THREADS = 4


class PinnedEntry(NamedTuple):
    """An entry that stays where it is until `unpin`, which is called once."""

    arrays: tuple[Bytes, ...]
    unpin: Callable[[], None]


class HostStore(EntryStore[Kept]):
    def __init__(
        self,
        max_bytes: int,
        allocate: Callable[[int], Bytes],
        entry_bytes: int,
        fingerprint: bytes = b"of this process",
    ) -> None:
        """`entry_bytes`: of the largest entry. Raises what `allocate` raises."""
        super().__init__(fingerprint, max_bytes)
        size = area_bytes(max_bytes, entry_bytes)
        self._areas = [Area(allocate(size)) for _ in range(max_bytes // size)]
        self._workers = Workers("pippin-host-read", NUM_THREADS)

    # ---- writing ---------------------------------------------------------------------------

    def write(self, entry: Entry, data: Sequence[Bytes]) -> bool:
        kept = self.keep(entry, data)
        if not kept:
            self.count(write_errors=1)
        return kept

    def keep(self, entry: Entry, data: Sequence[Bytes]) -> bool:
        """As `write`; where there is no room while all areas are being read, that is no error."""
        check_sizes(entry, data)
        if entry.key in self:
            return True
        area = self._make_room(entry.nbytes)
        if area is None:
            return False
        kept = Kept(entry, self.next_use(), area, area.end)
        at = kept.at
        for block in divided(data):
            begin = at
            for part in block.parts:
                area.memory[at : at + len(part)] = np.frombuffer(part, np.uint8)
                at += len(part)
            kept.digests.append(_digest(area.memory[begin:at]))
        with self._lock:
            area.kept[entry.key] = self._places[entry.key] = kept
            area.end += kept.nbytes
        nbytes = entry.nbytes
        self.count(bytes=nbytes, written=1, written_bytes=nbytes, kept_bytes=nbytes)
        return True

    def _make_room(self, nbytes: int) -> Area | None:
        """An area with `nbytes` of room at its end; None while all areas are being read."""
        while True:
            with self._lock:
                area = next((a for a in self._areas if a.end + nbytes <= a.memory.nbytes), None)
                if area is not None:
                    return area
                area = self._area_to_tidy(nbytes)
                if area is None:
                    return None
                while not area.has_gaps(nbytes):
                    for kept in area.unused_longest():
                        self.lose(kept, "evicted")
                area.moving = True
                left = list(area.kept.values())
            ends = area.close_gaps(left)
            with self._lock:
                for kept, at in zip(left, ends, strict=False):
                    kept.at = at
                area.end = ends[-1]
                area.moving = False
                self._lock.notify_all()

    def _area_to_tidy(self, nbytes: int) -> Area | None:
        free = [a for a in self._areas if not a.num_readers and a.memory.nbytes >= nbytes]
        gaping = [area for area in free if area.has_gaps(nbytes)]
        return min(gaping or free, key=lambda area: area.last_use, default=None)

    # ---- reading ---------------------------------------------------------------------------

    def read(self, keys: Sequence[Key], into: Sequence[Destination]) -> list[bool]:
        entries = [self.pin(key) for key in keys]
        try:
            there = [(one, to) for one, to in zip(entries, into, strict=True) if one is not None]
            copies = [copy for one, to in there for copy in zip(to, one.arrays, strict=True)]
            self._workers.map(_copy, copies, sum(to.nbytes for to, _ in copies))
        finally:
            for one in entries:
                if one is not None:
                    one.unpin()
        return [one is not None for one in entries]

    def pin(self, key: Key) -> PinnedEntry | None:
        """An entry, verified, where it lies."""
        with self._lock:
            while (kept := self._places.get(key)) is not None and kept.area.moving:
                self._lock.wait()
            if kept is None:
                self.count(misses=1)
                return None
            area = kept.area
            area.num_readers += 1

        def unpin() -> None:
            with self._lock:
                area.num_readers -= 1

        if self._workers.map(_digest, area.blocks(kept), kept.entry.nbytes) != kept.digests:
            unpin()
            self.lose(kept, "damaged")
            self.count(misses=1)
            return None
        self.count(hits=1, read_bytes=kept.entry.nbytes)
        return PinnedEntry(area.arrays(kept), unpin)

    def close(self) -> None:
        self._workers.close()
        self._places.clear()
        self._areas.clear()

    def _drop(self, place: Kept) -> None:
        super()._drop(place)
        del place.area.kept[place.entry.key]
        self.count(bytes=-place.entry.nbytes)


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
