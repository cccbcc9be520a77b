"""Reads from and writes to a tier's store, in threads of its own. Knows no tree and no steps.

One thread writes, another one reads: a load does not wait for writes. A piece is read into a
buffer, or, where it is one entry in host memory, pinned and used where it lies.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np

from pippin.cache.entries import ArraySpec, Bytes, Entry, EntryStore, Key
from pippin.cache.host_store import HostStore, PinnedEntry
from pippin.cache.tiers.tier_tree import Piece, num_bytes, read, views_of

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
            found = read(self.store, piece, specs, buffer)
            lost, arrays = (found, ()) if isinstance(found, list) else ([], found)
            return ReadPiece(arrays, lost, perf_counter() - began)
        assert isinstance(self.store, HostStore)
        (span,) = piece.spans
        pinned = self.store.pin(span.entry.key)
        seconds = perf_counter() - began
        if pinned is None:
            return ReadPiece((), piece.keys, seconds)
        return ReadPiece(views_of(pinned.loaded, span), [], seconds, pinned)


def _call(verb: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        verb(*arguments)
    except Exception:  # no caller waits for the result
        logger.exception("%s of a cache tier's store failed", verb)
