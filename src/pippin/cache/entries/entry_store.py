"""The verbs of a store of entries. Knows no files.

    write    keep an entry; from one thread at a time
    read     its bytes, verified, or a miss; from any thread
    touch    it was used: others go first when room is wanted
    forget   it is not wanted any more
    lost     keys that the store itself gave up since it was last asked
    flush    make it last: order of use, and what was written, on the disk itself

A store keeps itself under its ceiling: it gives up what was used longest ago. It never raises
for what a disk does (full, read-only, damaged, gone): that costs hits, and is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pippin.cache.entries.entry import Array, Bytes, Entry, Key, Loaded

# For each array of an entry, writable memory of its size: where its bytes are to be read to.
Destination = Sequence[Bytes]


@dataclass(frozen=True)
class StoreCounters:
    entries: int = 0  # that can be read now
    bytes: int = 0  # that the directory occupies, of other models too
    max_bytes: int = 0
    hits: int = 0  # entries that were read
    misses: int = 0  # entries that were asked for and are not there, or did not verify
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

        True as well where it was there already. Nobody may change `data` until this returns. Called
        by one thread at a time; may take as long as a disk does.
        """
        ...

    def read(
        self, keys: Sequence[Key], into: Sequence[Destination] | None = None
    ) -> list[Loaded | None]:
        """Entries with their bytes, in the order of the keys; None for each miss.

        With `into`, bytes go where the caller says, for instance into memory that it uses again and
        again; what lies there after a miss is undefined. Several entries are read and verified
        beside each other, without Python's lock. A key may come twice: it is read once where `into`
        is not given.
        """
        ...

    def touch(self, keys: Iterable[Key]) -> None:
        """These were used. Cheap; whoever restores a path touches all of it."""
        ...

    def forget(self, keys: Iterable[Key]) -> None:
        """Drop them; unknown ones are ignored. Cheap: the disk is told by a later `write`.

        After a crash before that they are there again, which does no harm.
        """
        ...

    def take_lost(self, limit: int | None = None) -> list[Key]:
        """Keys that were evicted or damaged, without `forget`, each once and in that order.

        Cheap. With a `limit`, the others are for the next call.
        """
        ...

    def clear(self) -> None:
        """Drop everything of this model."""
        ...

    def flush(self) -> None: ...

    def counters(self) -> StoreCounters: ...

    def close(self) -> None:
        """Flush and let go. No verb may be called after it, and none be under way."""
        ...


def as_loaded(entry: Entry, data: Sequence[Bytes]) -> Loaded:
    arrays = zip(entry.arrays, data, strict=True)
    return Loaded(entry, tuple(Array(spec, part) for spec, part in arrays))


def check_sizes(entry: Entry, data: Sequence[Bytes]) -> None:
    """A caller's mistake, not a disk's: these are not the bytes of this entry."""
    sizes = [part.nbytes for part in data]
    expected = [spec.nbytes for spec in entry.arrays]
    if sizes != expected or not all(part.flags.c_contiguous for part in data):
        raise ValueError(f"whole arrays of {expected} bytes were announced, {sizes} came")
