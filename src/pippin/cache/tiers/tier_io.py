"""Parts of entries, which a tier's tree has as payloads, and how threads read and write them.

One thread writes, another one reads: a load does not wait for writes. A piece is read into a
buffer, or, where it is one entry in host memory, pinned and used where it lies.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np

from pippin.cache.entries import ArraySpec, Bytes, Entry, EntryStore, Key
from pippin.cache.host_store import HostStore, PinnedEntry
from pippin.cache.prefix_cache import Match
from pippin.cache.tree.radix import Node
from pippin.types import Component, Payload


class Span(NamedTuple):
    """Tokens [start, stop) of an entry's own; of a state or a hidden vector [0, 1)."""

    entry: Entry
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.num_tokens == self.entry.num_parts

    def views(self, arrays: Sequence[Bytes]) -> tuple[Bytes, ...]:
        """Of the whole entry's arrays its part."""
        both = zip(self.entry.arrays, arrays, strict=True)
        return tuple(spec.tokens(data, self.start, self.stop) for spec, data in both)


@dataclass(eq=False)
class Owned:
    """An entry that the tree names, and the parts by which it does: each knows its node."""

    entry: Entry
    on_unused: Callable[[Owned], None]
    parts: dict[EntryPart, None] = field(default_factory=dict)  # a set, in a fixed order
    unreadable: bool = False  # it did not read back as it was written

    @property
    def key(self) -> Key:
        return self.entry.key

    def part(self) -> EntryPart:
        """All of it, for an insert."""
        return EntryPart(self, 0, self.entry.num_parts)


class EntryPart:
    """A payload of the disk's tree."""

    __slots__ = ("node", "owner", "start", "stop")

    def __init__(self, owner: Owned, start: int, stop: int) -> None:
        self.owner = owner
        self.start = start
        self.stop = stop
        self.node: Node | None = None  # that has it; None: an insert has yet to place it
        owner.parts[self] = None

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> Span:
        return Span(self.owner.entry, self.start, self.stop)

    @property
    def nbytes(self) -> int:
        """Such that those of all parts add up."""
        nbytes, total = self.owner.entry.nbytes, self.owner.entry.num_parts
        return nbytes * self.stop // total - nbytes * self.start // total

    def split(self, at: int) -> tuple[Payload, Payload]:
        cut = self.start + at
        del self.owner.parts[self]
        return EntryPart(self.owner, self.start, cut), EntryPart(self.owner, cut, self.stop)

    def release(self) -> None:
        owner = self.owner
        assert self in owner.parts, "a part was released twice"
        del owner.parts[self]
        if not owner.parts:
            owner.on_unused(owner)

    def fingerprint(self) -> int:
        """Its bytes are verified when they are read; this is what they are read by."""
        return hash((self.owner.key, self.start, self.stop))


@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) of one component, or what is kept after `end`."""

    component: Component
    start: int
    end: int
    spans: tuple[Span, ...]

    @property
    def num_tokens(self) -> int:
        """Of the payload that it becomes."""
        return self.end - self.start if self.component.divides else 1

    @property
    def nbytes(self) -> int:
        """To read: entries are read whole."""
        return sum(span.entry.nbytes for span in self.spans)

    @property
    def keys(self) -> list[Key]:
        return [span.entry.key for span in self.spans]


def pieces(match: Match, held: int, max_bytes: int) -> list[Piece]:
    """What restores a match on disk where memory holds the KV of the first `held` tokens.

    In the order in which a tree can take them.
    """
    found: list[Piece] = []
    for component in Component:
        parts = spans(match.payloads.get(component, ()))
        if not parts or (component is Component.HIDDEN and match.length < match.prompt_len):
            continue
        if component.divides:
            first = held if component is Component.ATTENTION else 0
            found += _grouped(component, first, match.length, parts, max_bytes)
        else:
            found.append(Piece(component, match.length, match.length, tuple(parts)))
    return found


def spans(parts: Sequence[Payload]) -> list[Span]:
    """Parts of one entry that follow each other as one: an entry is read whole, and once."""
    found: list[Span] = []
    for part in parts:
        assert isinstance(part, EntryPart)
        span = part.span
        if found and found[-1].entry is span.entry and found[-1].stop == span.start:
            span = Span(span.entry, found.pop().start, span.stop)
        found.append(span)
    return found


def _grouped(
    component: Component, first: int, end: int, parts: Sequence[Span], max_bytes: int
) -> Iterator[Piece]:
    """Spans that end at `end`, less what lies before `first`: as many together as make a piece of
    `max_bytes`."""
    group: list[Span] = []
    nbytes = 0  # of the group
    start = stop = end - sum(span.num_tokens for span in parts)
    for span in parts:
        skipped = min(max(0, first - stop), span.num_tokens)
        if group and nbytes + span.entry.nbytes > max_bytes:
            yield Piece(component, start, stop, tuple(group))
            group, nbytes = [], 0
        if not group:
            start = stop + skipped
        stop += span.num_tokens
        if skipped < span.num_tokens:
            nbytes += span.entry.nbytes
            group.append(Span(span.entry, span.start + skipped, span.stop))
    if group:
        yield Piece(component, start, stop, tuple(group))


def read(
    store: EntryStore[Any], piece: Piece, specs: Sequence[ArraySpec], buffer: Bytes
) -> tuple[tuple[Bytes, ...], list[Key]]:
    """The piece's arrays, in `buffer`, and the keys that could not be read. From any thread.

    An entry of which only a part is wanted is read to memory of its own first.
    """
    ends = accumulate((spec.nbytes for spec in specs), initial=0)
    arrays, at = tuple(buffer[start:end] for start, end in pairwise(ends)), 0
    targets: list[list[Bytes]] = []
    for span in piece.spans:
        end = at + span.num_tokens
        targets.append([s.tokens(a, at, end) for a, s in zip(arrays, specs, strict=True)])
        at = end
    parts = list(zip(piece.spans, targets, strict=True))
    into = [to if span.is_whole else span.entry.new_buffers() for span, to in parts]
    found = store.read(piece.keys, into)
    for (span, to), content, is_there in zip(parts, into, found, strict=True):
        if is_there and not span.is_whole:
            for target, part in zip(to, span.views(content), strict=True):
                target[:] = part
    return arrays, [key for key, is_there in zip(piece.keys, found, strict=True) if not is_there]


def num_bytes(specs: Sequence[ArraySpec]) -> int:
    return sum(spec.nbytes for spec in specs)


PIECES_AHEAD = 4  # of a load: two in steps, one that was read, one being read
MAX_IDLE_BUFFERS = 4

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Bytes that a step has spilled, or that the tier above has."""

    def arrays(self) -> Sequence[Bytes]:
        """Raises LostAbove where the tier above does not have them any more."""
        ...

    def release(self) -> None: ...


class LostAbove(Exception):
    """The tier above has evicted entries that were to be copied, or they did not verify."""


class ReadPiece(NamedTuple):
    """A piece whose bytes are there; or keys that could not be read."""

    arrays: tuple[Bytes, ...]
    lost: list[Key]
    seconds: float
    pinned: PinnedEntry | None = None  # None: they are in the reader's own buffer


class PieceSource:
    """A piece of the tier above, which the writer of the one below reads and verifies."""

    def __init__(self, tier_io: TierIO, piece: Piece, specs: Sequence[ArraySpec]) -> None:
        self._tier_io = tier_io
        self._piece = piece
        self._specs = specs
        self._pinned: PinnedEntry | None = None

    def arrays(self) -> Sequence[Bytes]:
        lies_there = self._tier_io.lies_there(self._piece)
        buffer = None if lies_there else plain_memory(num_bytes(self._specs))
        found = self._tier_io.read_now(self._piece, self._specs, buffer)
        self._pinned = found.pinned
        if found.lost:  # the store reports these
            raise LostAbove
        return found.arrays

    def release(self) -> None:
        if self._pinned is not None:
            self._pinned.unpin()


class Buffers:
    """Memory that pieces are read to, used again and again: fresh pages cost more than a copy.

    Pinning memory takes longer than filling it, so what one load needs is allocated beforehand.
    """

    def __init__(self, allocate: Callable[[int], Bytes], piece_bytes: int) -> None:
        """`piece_bytes`: of nearly every piece, at most."""
        self._allocate = allocate
        self._piece_bytes = piece_bytes
        self._idle = [allocate(piece_bytes) for _ in range(PIECES_AHEAD if piece_bytes else 0)]

    def claim(self, nbytes: int) -> Bytes:
        fitting = [buffer for buffer in self._idle if buffer.nbytes >= nbytes]
        if not fitting:
            return self._allocate(max(nbytes, self._piece_bytes))
        buffer = min(fitting, key=lambda buffer: buffer.nbytes)
        self._idle = [idle for idle in self._idle if idle is not buffer]
        return buffer

    def release(self, buffer: Bytes) -> None:
        self._idle.append(buffer)
        if len(self._idle) > MAX_IDLE_BUFFERS:
            smallest = min(self._idle, key=lambda buffer: buffer.nbytes)
            self._idle = [idle for idle in self._idle if idle is not smallest]


def plain_memory(nbytes: int) -> Bytes:
    return np.empty(nbytes, dtype=np.uint8)


class TierIO:
    def __init__(
        self,
        store: EntryStore[Any],
        *,
        allocate: Callable[[int], Bytes] = plain_memory,
        piece_bytes: int = 0,
        writer: Executor | None = None,
        reader: Executor | None = None,
    ) -> None:
        self.store = store
        self.buffers = Buffers(allocate, piece_bytes)
        self._writer = writer or ThreadPoolExecutor(1, "pippin-cache-writer")
        self._reader = reader or ThreadPoolExecutor(1, "pippin-cache-reader")

    def write(self, entries: Sequence[Entry], sources: Sequence[Source]) -> Future[list[bool]]:
        """Which of these were kept, in order; none is tried after one that was not. Fewer, where
        the tier above had not all of them any more."""
        return self._writer.submit(self._write, entries, sources)

    def read(
        self, piece: Piece, specs: Sequence[ArraySpec], buffer: Bytes | None
    ) -> Future[ReadPiece]:
        """`buffer`: of `claim_buffer`, for this piece."""
        return self._reader.submit(self.read_now, piece, specs, buffer)

    def claim_buffer(self, piece: Piece, specs: Sequence[ArraySpec]) -> Bytes | None:
        """Where a piece is to be read to; None: it is used where it lies."""
        return None if self.lies_there(piece) else self.buffers.claim(num_bytes(specs))

    def lies_there(self, piece: Piece) -> bool:
        """Whether a piece can be used where it lies."""
        return len(piece.spans) == 1 and isinstance(self.store, HostStore)

    def release(self, buffer: Bytes | None, reading: Future[ReadPiece]) -> None:
        """The bytes of a piece are not used any more, and its read has ended."""
        if buffer is not None:
            self.buffers.release(buffer)
        elif not reading.cancelled() and reading.exception() is None:
            pinned = reading.result().pinned
            if pinned is not None:
                pinned.unpin()

    def tell(self, verb: Callable[..., None], *arguments: Any) -> None:
        """Call a verb of the store in the writer's thread; the caller does not wait."""
        self._writer.submit(_call, verb, arguments)

    def close(self) -> None:
        """Waits for what is running."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()

    def _write(self, entries: Sequence[Entry], sources: Sequence[Source]) -> list[bool]:
        kept: list[bool] = []
        left = deque(sources)
        try:
            for entry in entries:
                kept.append(all(kept) and self.store.write(entry, left[0].arrays()))
                left.popleft().release()
        except LostAbove:
            pass  # those before it were kept
        finally:
            for source in left:
                source.release()
        return kept

    def read_now(self, piece: Piece, specs: Sequence[ArraySpec], buffer: Bytes | None) -> ReadPiece:
        """As `read`, in the caller's thread."""
        began = perf_counter()
        if buffer is not None:
            arrays, lost = read(self.store, piece, specs, buffer)
            return ReadPiece(arrays, lost, perf_counter() - began)
        assert isinstance(self.store, HostStore)
        (span,) = piece.spans
        pinned = self.store.pin(span.entry.key)
        seconds = perf_counter() - began
        if pinned is None:
            return ReadPiece((), piece.keys, seconds)
        return ReadPiece(span.views(pinned.arrays), [], seconds, pinned)


def _call(verb: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        verb(*arguments)
    except Exception:  # no caller waits for the result
        logger.exception("%s of a cache tier's store failed", verb)
