"""The verbs of a store of entries. Knows no files.

    write    keep an entry; from one thread at a time
    read     its bytes, verified, or a miss; from any thread
    touch    it was used: others are evicted before it
    forget   it is not wanted any more
    lost     keys that the store evicted or found damaged since the last call
    flush    make it durable: order of use, and what was written, on the disk itself

A store keeps itself within its bytes: it evicts what was used longest ago. It never raises for
what a disk does (full, read-only, damaged, removed): that costs hits, and is counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Condition
from typing import Generic, Protocol, TypeVar

from pippin.cache.entries.entry import Bytes, Chain, Entry, Key, Loaded


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


# For each array of an entry, writable memory of its size: where its bytes are to be read to.
Destination = Sequence[Bytes]


@dataclass(frozen=True)
class StoreCounters:
    entries: int = 0  # that can be read now
    bytes: int = 0  # that the directory occupies, of other models too
    max_bytes: int = 0
    hits: int = 0  # entries read
    misses: int = 0  # entries that are not there, or did not verify
    read_bytes: int = 0
    written: int = 0  # entries since the store was opened
    written_bytes: int = 0  # by all writing: payloads, indexes, moving and notes of use
    kept_bytes: int = 0  # payloads that were written for callers
    evicted: int = 0  # entries that made room
    damaged: int = 0  # pieces of a file that did not verify, each counted once
    foreign: int = 0  # files that are not of this model and format
    write_errors: int = 0  # entries that could not be written
    read_errors: int = 0  # reads that the system refused


class EntryStore(Protocol):
    @property
    def fingerprint(self) -> bytes:
        """Of the model that all of these entries belong to."""
        ...

    def entries(self) -> Sequence[Entry]:
        """What is there now, the longest unused first."""
        ...

    def __contains__(self, key: Key) -> bool: ...

    def write(self, entry: Entry, data: Sequence[Bytes]) -> bool:
        """Keep an entry, given the bytes of its arrays; returns whether it is kept.

        True as well where it was there already. `data` may not change until this returns. Called by
        one thread at a time; may take as long as a disk does.
        """
        ...

    def read(
        self, keys: Sequence[Key], into: Sequence[Destination] | None = None
    ) -> list[Loaded | None]:
        """Entries with their bytes, in the order of the keys; None for each miss.

        With `into`, bytes are read to the caller's memory, whose content after a miss is undefined.
        Several entries are read and verified in parallel, without Python's lock. A key may occur
        twice: it is read once where `into` is not given.
        """
        ...

    def touch(self, keys: Iterable[Key]) -> None:
        """These were used. Cheap; a restore touches all of its path."""
        ...

    def forget(self, keys: Iterable[Key]) -> None:
        """Drop them; unknown ones are ignored. Cheap: a later `write` notes it on disk.

        After a crash before that they are there again, which does no harm.
        """
        ...

    def take_lost(self, limit: int | None = None) -> list[Key]:
        """Keys that were evicted or damaged, without `forget`, each once and in that order.

        Cheap. With a `limit`, the others are left for the next call.
        """
        ...

    def flush(self) -> None: ...

    def counters(self) -> StoreCounters: ...

    def close(self) -> None:
        """Flush and close. No verb may be called after it, or be running."""
        ...


def check_sizes(entry: Entry, data: Sequence[Bytes]) -> None:
    """Raise ValueError where a caller's arrays are not those of the entry."""
    sizes = [part.nbytes for part in data]
    expected = [spec.nbytes for spec in entry.arrays]
    if sizes != expected or not all(part.flags.c_contiguous for part in data):
        raise ValueError(f"arrays of {sizes} bytes, the entry has {expected}: write them whole")


@dataclass(frozen=True)
class Placed:
    """An entry whose whole path is known."""

    entry: Entry
    chain: Chain  # at the entry's start
    above: Placed | None  # an entry that holds the token before `start`; None at the root
    root: bytes  # the chain key of the path's root: another for each salt

    def path_tokens(self) -> bytes:
        """All tokens from the root to the entry's end, as tree nodes keep them."""
        pieces = [self.entry.tokens]
        start, above = self.entry.start, self.above
        while above is not None:
            pieces.append(above.entry.tokens[: (start - above.entry.start) * 4])
            start, above = above.entry.start, above.above
        return b"".join(reversed(pieces))


@dataclass(frozen=True)
class Rebuilt:
    placed: list[Placed]  # parents before children
    orphans: list[Key]  # without a path from the root: not to be used


def rebuild(entries: Iterable[Entry], fingerprint: bytes) -> Rebuilt:
    """Order entries into paths from the root."""
    waiting: dict[bytes, list[Entry]] = defaultdict(list)  # by the chain key where they begin
    starts: set[int] = set()
    at_root: dict[bytes, None] = {}
    num_entries = 0
    for entry in entries:
        waiting[entry.parent].append(entry)
        starts.add(entry.start)
        if not entry.start:
            at_root[entry.parent] = None
        num_entries += 1
    plain = Chain(fingerprint)
    roots = [plain, *(Chain.of_root(key) for key in at_root if key != plain.key)]
    found = [
        Placed(entry, root, None, root.key) for root in roots for entry in waiting.pop(root.key, ())
    ]
    placed: list[Placed] = []
    orphans: list[Key] = []
    for above in found:  # grows while it is walked
        places = _places_inside(above, starts)
        if (places[-1] if places else above.chain).key != above.entry.key.chain:
            orphans.append(above.entry.key)  # its own tokens are not those of its name
            continue
        placed.append(above)
        for chain in places:
            below = waiting.pop(chain.key, ())
            found += [Placed(entry, chain, above, above.root) for entry in below]
    orphans += [entry.key for left in waiting.values() for entry in left]
    assert len(placed) + len(orphans) == num_entries
    return Rebuilt(placed, orphans)


def _places_inside(above: Placed, starts: set[int]) -> list[Chain]:
    """Chains at the places in (start, end] of an entry where others might begin, its end last."""
    start, end, chain = above.entry.start, above.entry.end, above.chain
    places = [at for at in range(start + 1, end) if at in starts]
    chains: list[Chain] = []
    for at in [*places, end] if end > start else []:
        chain = chain.extended(above.entry.tokens[(chain.length - start) * 4 : (at - start) * 4])
        chains.append(chain)
    return chains
