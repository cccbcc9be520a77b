"""Entries: payloads of the prefix cache as bytes, named by the tokens they were computed from.

                  tokens [start, end)                       payload                      divides
    attention     those that the KV is of                   KV of these tokens           yes
    window        those that the KV is of                   KV of these tokens           yes
    state         from the end of any entry above           what holds after `end`       no
    hidden        the same                                  what the head read there     no

**When a node is split** after its entry was written, nothing is written again: both nodes name the
one entry, and each uses its range of tokens of what was read (`ArraySpec.tokens`). A digest covers
a whole entry, so a part is read with the rest of it; several parts of one entry that are read
together cost one read. What is inserted below the split names it by its chain key, which does not
depend on where nodes end; `rebuild` finds it inside of the longer entry.

**Between backends.** A payload is a list of named arrays with dtype and shape. A reader compares
`Entry.arrays` with what it would have written itself: a difference is a miss.
"""

from __future__ import annotations

import hashlib
import os
import sys
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from math import prod
from threading import Condition
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from pippin.types import Component

KEY_BYTES = 32


class Chain:
    """All tokens from the root to one position, hashed so far; about 400 bytes.

    A value: `extended` makes another. It costs the hash of the new tokens alone, at about a
    gigabyte a second, so a node that keeps its chain names what hangs below it cheaply.
    """

    __slots__ = ("_hash", "key", "length")

    def __init__(self, fingerprint: bytes, salt: bytes = b"") -> None:
        """The root, for a model of this fingerprint (`fingerprint.py`) and a salt's digest."""
        self.length = 0
        self._hash = hashlib.blake2b(fingerprint, digest_size=KEY_BYTES, person=b"pippin chain 1")
        self.key = self._hash.digest()
        if salt:
            salted = hashlib.blake2b(
                fingerprint, key=salt, digest_size=KEY_BYTES, person=b"pippin salt 1"
            )
            self.key = salted.digest()
            self._hash = _hash_below(self.key)

    @classmethod
    def of_root(cls, key: bytes) -> Chain:
        """A root that some salt led to, of its key alone: entries name it, a salt is never kept."""
        chain = cls.__new__(cls)
        chain.length, chain.key, chain._hash = 0, key, _hash_below(key)
        return chain

    def extended(self, tokens: npt.NDArray[np.int32] | bytes) -> Chain:
        """The chain after these tokens too (int32, or their bytes as a tree node keeps them)."""
        raw = tokens if isinstance(tokens, bytes) else tokens.astype(np.int32).tobytes()
        chain = Chain.__new__(Chain)
        chain._hash = self._hash.copy()
        chain._hash.update(little_endian(raw))
        chain.key = chain._hash.digest()
        chain.length = self.length + len(raw) // 4
        return chain


def _hash_below(root: bytes) -> hashlib.blake2b:
    """Of sequences with a salt."""
    return hashlib.blake2b(root, digest_size=KEY_BYTES, person=b"pippin chain 2")


def little_endian(raw: bytes) -> bytes:
    """int32 tokens of this machine's order as they are written to files, or back."""
    if sys.byteorder == "little":
        return raw
    return np.frombuffer(raw, dtype=np.int32).byteswap().tobytes()


# Bytes of one element. Names are those of numpy, mlx and torch, which agree on all of these.
ITEM_BYTES = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64"), 8),
}

Bytes = npt.NDArray[np.uint8]


class Key(NamedTuple):
    """The name of an entry. Equal keys mean equal contents, but for rounding."""

    chain: bytes  # the chain key at the entry's end: all tokens from the root, and the model
    component: Component
    num_tokens: int  # that the payload divides into, before the end; 0: it holds at the end alone


@dataclass(frozen=True)
class ArraySpec:
    """One array of a payload: contiguous, in row order, little-endian."""

    name: str  # for instance "3.keys"; says which of a model's arrays this is
    dtype: str  # one of ITEM_BYTES
    shape: tuple[int, ...]
    token_axis: int | None = None  # 0: it divides into tokens along its first axis

    @cached_property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * prod(self.shape)

    def tokens(self, data: Bytes, start: int, stop: int) -> Bytes:
        """A view of the bytes of tokens [start, stop); of an array that does not divide, all."""
        if self.token_axis is None:
            return data
        size = self.nbytes // max(self.shape[0], 1)
        return data[start * size : stop * size]


@dataclass(frozen=True)
class Entry:
    """All that is known of an entry without reading its payload: enough to rebuild a tree."""

    key: Key
    parent: bytes  # the chain key at `start`; that of an empty chain at the root
    start: int
    tokens: bytes  # int32 of this machine's order, as tree nodes keep them; [start, end)
    arrays: tuple[ArraySpec, ...]

    def __post_init__(self) -> None:
        num_tokens = self.end - self.start
        if self.key.num_tokens not in (0, num_tokens):
            raise ValueError(f"a payload of {self.key.num_tokens} tokens over {num_tokens}")
        for array in self.arrays:
            divides = array.token_axis == 0 and array.shape[0] == self.key.num_tokens
            if array.dtype not in ITEM_BYTES or divides != (self.key.num_tokens > 0):
                raise ValueError(f"{array} does not divide into {self.key.num_tokens} tokens")

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // 4

    @property
    def num_parts(self) -> int:
        """How many tokens its payload divides into."""
        return self.key.num_tokens or 1

    @cached_property
    def nbytes(self) -> int:
        """Of the payload."""
        return sum(array.nbytes for array in self.arrays)

    def new_buffers(self) -> list[Bytes]:
        """Memory to read its arrays to."""
        return [np.empty(array.nbytes, np.uint8) for array in self.arrays]


BLOCK_BYTES = 2 << 20  # of the format on disk: readers divide as the writer did
ALONE_BYTES = 1 << 20  # less than this is done by the caller alone

Part = TypeVar("Part")
Result = TypeVar("Result")


class Block(NamedTuple):
    at: int  # bytes of the payload before it
    parts: list[memoryview]  # its own

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def digest(self) -> bytes:
        """Large parts are hashed without Python's lock."""
        digest = xxhash.xxh3_128()
        for part in self.parts:
            digest.update(part)
        return digest.digest()


def divided(data: Sequence[Bytes]) -> list[Block]:
    """The memory of a payload's arrays, block by block."""
    blocks: list[Block] = []
    at, filled = 0, BLOCK_BYTES
    for view in views(data):
        first = 0
        while first < len(view):
            if filled == BLOCK_BYTES:
                blocks.append(Block(at, []))
                filled = 0
            part = view[first : first + BLOCK_BYTES - filled]
            blocks[-1].parts.append(part)
            first += len(part)
            filled += len(part)
            at += len(part)
    return blocks


def views(parts: Sequence[Bytes | bytes]) -> list[memoryview]:
    """The memory of those that are not empty."""
    found = [part.data if isinstance(part, np.ndarray) else memoryview(part) for part in parts]
    return [view.cast("B") for view in found if view.nbytes]


class Workers:
    """A few threads that share what is to be done, where that is much."""

    def __init__(self, name: str, max_threads: int) -> None:
        num_threads = min(max_threads, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    def map(
        self, work: Callable[[Part], Result], parts: Sequence[Part], nbytes: int
    ) -> list[Result]:
        """What `work` returns for each part, in order; none is running when this returns."""
        if nbytes < ALONE_BYTES:
            return [work(part) for part in parts]
        futures = [self._pool.submit(work, part) for part in parts]
        wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        self._pool.shutdown()


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


@dataclass(slots=True, eq=False)
class Place:
    """Where an entry lies."""

    entry: Entry
    use: int  # the store's clock at its last use


SomePlace = TypeVar("SomePlace", bound=Place)


class EntryStore(ABC, Generic[SomePlace]):
    """Keeps entries within its bytes: it evicts what was used longest ago.

    It never raises for what a disk does (full, read-only, damaged, removed): that costs hits, and
    is counted. One thread writes at a time; any may call the other verbs.
    """

    def __init__(self, fingerprint: bytes, max_bytes: int) -> None:
        """`fingerprint`: of the model that all of these entries belong to."""
        self.fingerprint = fingerprint
        self.max_bytes = max_bytes
        self.clock = 0  # grows with each use and each entry
        self._places: dict[Key, SomePlace] = {}
        self._lost: list[Key] = []
        self._counts: Counter[str] = Counter()
        self._lock = Condition()

    @abstractmethod
    def write(self, entry: Entry, data: Sequence[Bytes]) -> bool:
        """Keep an entry, given the bytes of its arrays; returns whether it is kept.

        True as well where it was there already. `data` may not change until this returns. May take
        as long as a disk does.
        """

    @abstractmethod
    def read(self, keys: Sequence[Key], into: Sequence[Destination]) -> list[bool]:
        """Read entries to the caller's memory; whether each is there, and verified.

        What a miss leaves in that memory is undefined. Several entries are read and verified in
        parallel, without Python's lock. A key may occur twice.
        """

    def flush(self) -> None:
        """Make it durable: the order of use, and what was written. In memory, nothing is."""

    def close(self) -> None:
        """Flush and close. No verb may be called after it, or be running."""

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def entries(self) -> Sequence[Entry]:
        """What is there now, the longest unused first."""
        with self._lock:
            places = sorted(self._places.values(), key=lambda place: place.use)
        return [place.entry for place in places]

    def touch(self, keys: Iterable[Key]) -> None:
        """These were used. Cheap; a restore touches all of its path."""
        with self._lock:
            for key in keys:
                place = self._places.get(key)
                if place is not None:
                    self._set_use(place, self.next_use())

    def forget(self, keys: Iterable[Key]) -> None:
        """Drop them; unknown ones are ignored. Cheap: a later `write` notes it on disk.

        After a crash before that they are there again, which does no harm.
        """
        with self._lock:
            for key in keys:
                place = self._places.get(key)
                if place is not None:
                    self._drop(place)

    def take_lost(self, limit: int | None = None) -> list[Key]:
        """Keys that were evicted or damaged, without `forget`, each once and in that order.

        Cheap. With a `limit`, the others are left for the next call.
        """
        with self._lock:
            lost = self._lost[:limit]
            del self._lost[:limit]
            return lost

    def counters(self) -> StoreCounters:
        return StoreCounters(entries=len(self), max_bytes=self.max_bytes, **self._all_counts())

    # ---- for the stores themselves -----------------------------------------------------------

    def next_use(self) -> int:
        with self._lock:
            self.clock += 1
            return self.clock

    def lose(self, place: SomePlace, reason: str) -> bool:
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

    def count(self, **more: int) -> None:
        with self._lock:
            self._counts.update(more)

    def _all_counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def _set_use(self, place: SomePlace, use: int) -> None:
        place.use = use

    def _drop(self, place: SomePlace) -> None:
        del self._places[place.entry.key]


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


def rebuild(entries: Iterable[Entry], fingerprint: bytes) -> tuple[list[Placed], list[Key]]:
    """Order entries into paths from the root, parents before children; and the keys of those
    without a path, which are not to be used."""
    waiting: dict[bytes, list[Entry]] = defaultdict(list)  # by the chain key where they begin
    for entry in entries:
        waiting[entry.parent].append(entry)
    starts = {entry.start for each in waiting.values() for entry in each}
    plain = Chain(fingerprint)
    at_root = [key for key, each in waiting.items() if any(not entry.start for entry in each)]
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
    return placed, orphans + [entry.key for left in waiting.values() for entry in left]


def _places_inside(above: Placed, starts: set[int]) -> list[Chain]:
    """Chains at the places in (start, end] of an entry where others might begin, its end last."""
    start, end, chain = above.entry.start, above.entry.end, above.chain
    places = [at for at in range(start + 1, end) if at in starts]
    chains: list[Chain] = []
    for at in [*places, end] if end > start else []:
        chain = chain.extended(above.entry.tokens[(chain.length - start) * 4 : (at - start) * 4])
        chains.append(chain)
    return chains
