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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pippin.cache.entries.entry import Bytes, Entry, Key, Loaded

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
