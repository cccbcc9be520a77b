"""Carries bytes to and from the store, in threads of its own. Knows no tree and no steps.

One thread writes, another one reads: a load does not wait for what is written behind. A piece is
read into a buffer, or, where it is one entry of a store that lends, used where it lies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from pippin.cache.entries.entry import ArraySpec, Bytes, Entry, Key
from pippin.cache.entries.entry_store import EntryStore
from pippin.cache.host.host_store import PinnedEntry
from pippin.cache.tiers.pieces import Piece, num_bytes, read, views_of

PIECES_AHEAD = 4  # of a load: two in steps, one that was read, one being read
MAX_IDLE_BUFFERS = 4

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Bytes that a step has spilled."""

    def arrays(self) -> Sequence[Bytes]: ...

    def release(self) -> None: ...


@runtime_checkable
class PinningStore(Protocol):
    """A store whose bytes can be used where they lie."""

    def pin(self, key: Key) -> PinnedEntry | None:
        """Verified; None: a miss, as of `read`."""
        ...


class ReadPiece(NamedTuple):
    """A piece whose bytes are there; or keys that could not be read."""

    arrays: tuple[Bytes, ...]
    lost: list[Key]
    seconds: float
    pinned: PinnedEntry | None = None  # None: they are in the reader's own buffer


class Buffers:
    """Memory that pieces are read to, used again and again: fresh pages cost more than a copy.

    Where it is pinned, it takes longer to get than to fill. So what one load needs is there before
    somebody waits for it.
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
        store: EntryStore,
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
        """Which of these were kept, in order; nothing is tried any more after one that was not."""
        return self._writer.submit(self._write, entries, sources)

    def read(
        self, piece: Piece, specs: Sequence[ArraySpec], buffer: Bytes | None
    ) -> Future[ReadPiece]:
        """`buffer`: of `claim_buffer`, for this piece."""
        return self._reader.submit(self._read, piece, specs, buffer)

    def claim_buffer(self, piece: Piece, specs: Sequence[ArraySpec]) -> Bytes | None:
        """Where a piece is to be read to; None: it is used where it lies."""
        if len(piece.spans) == 1 and isinstance(self.store, PinningStore):
            return None
        return self.buffers.claim(num_bytes(specs))

    def release(self, buffer: Bytes | None, reading: Future[ReadPiece]) -> None:
        """Nobody uses a piece any more, and its reading is over."""
        if buffer is not None:
            self.buffers.release(buffer)
        elif not reading.cancelled() and reading.exception() is None:
            pinned = reading.result().pinned
            if pinned is not None:
                pinned.unpin()

    def tell(self, verb: Callable[..., None], *arguments: Any) -> None:
        """Have the store do something that nobody waits for."""
        self._writer.submit(self._told, verb, arguments)

    def close(self) -> None:
        """Whatever is under way ends first."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()

    def _write(self, entries: Sequence[Entry], sources: Sequence[Source]) -> list[bool]:
        kept: list[bool] = []
        try:
            for entry, source in zip(entries, sources, strict=True):
                kept.append(all(kept) and self.store.write(entry, source.arrays()))
        finally:
            for source in sources:
                source.release()
        return kept

    def _read(self, piece: Piece, specs: Sequence[ArraySpec], buffer: Bytes | None) -> ReadPiece:
        began = perf_counter()
        if buffer is None:
            return self._borrow(piece, began)
        found = read(self.store, piece, specs, buffer)
        seconds = perf_counter() - began
        if isinstance(found, list):
            return ReadPiece((), found, seconds)
        return ReadPiece(found, [], seconds)

    def _borrow(self, piece: Piece, began: float) -> ReadPiece:
        assert isinstance(self.store, PinningStore)
        (key,) = piece.keys
        pinned = self.store.pin(key)
        seconds = perf_counter() - began
        if pinned is None:
            return ReadPiece((), [key], seconds)
        return ReadPiece(views_of(pinned.loaded, piece.spans[0]), [], seconds, pinned)

    @staticmethod
    def _told(verb: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            verb(*arguments)
        except Exception:  # nobody waits for it who could be told
            logger.exception("a cache's store: %s failed", verb)
