"""Writes entries behind whoever makes them: a thread, a bounded queue, so many bytes a second.

    offered ──> queued (visible in memory) ──> written by the thread ──> in the store, and told

From `offer` until its write is complete an entry can be read from memory: it never vanishes in
between. What does not fit into the queue is refused at once, and nobody waits. Knows no device: the
bytes that it is given lie in memory, and stay as they are until the entry has been told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread

from pippin.cache.disk.base import Destination, EntryStore, as_loaded, check_sizes
from pippin.cache.disk.entries import Bytes, Entry, Key, Loaded

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Written:
    """What became of an entry that was offered."""

    key: Key
    kept: bool


class StoreWriter:
    def __init__(
        self,
        store: EntryStore,
        *,
        max_queued_bytes: int,
        bytes_per_second: float,
        told: Callable[[], None] = lambda: None,
    ) -> None:
        """`told` is called by the writer's thread when there is something for `take_written`."""
        self.store = store
        self.max_queued_bytes = max_queued_bytes
        self.bytes_per_second = bytes_per_second
        self.refused = 0  # entries that did not fit into the queue
        self._told = told
        self._queue: dict[Key, Loaded] = {}  # the oldest first; the one being written is in it
        self._queued_bytes = 0
        self._written: list[Written] = []
        self._hurries = False  # somebody waits for the queue to be empty: no pauses
        self._ends = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="pippin-disk-write", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def __contains__(self, key: Key) -> bool:
        return key in self._queue

    def offer(self, entry: Entry, data: Sequence[Bytes]) -> bool:
        """Write it when there is time; False if the queue is full. Waits for nothing.

        True as well for one that is queued already. Nobody may change `data` before
        `take_written` tells of it.
        """
        check_sizes(entry, data)
        with self._changed:
            if self._ends:
                return False
            if entry.key not in self._queue:
                if self._queued_bytes + entry.nbytes > self.max_queued_bytes:
                    self.refused += 1
                    return False
                self._queue[entry.key] = as_loaded(entry, data)
                self._queued_bytes += entry.nbytes
                self._changed.notify_all()
            return True

    def read(
        self, keys: Sequence[Key], into: Sequence[Destination] | None = None
    ) -> list[Loaded | None]:
        """As `EntryStore.read`, with what is queued. With `into`, that is copied there too."""
        with self._changed:
            queued = {key: self._queue[key] for key in keys if key in self._queue}
        if not queued:
            return self.store.read(keys, into)
        stored = [index for index, key in enumerate(keys) if key not in queued]
        asked = None if into is None else [into[index] for index in stored]
        read = iter(self.store.read([keys[index] for index in stored], asked))
        found: list[Loaded | None] = []
        for index, key in enumerate(keys):
            if key not in queued:
                found.append(next(read))
            elif into is None:
                found.append(queued[key])
            else:
                found.append(_copied(queued[key], into[index]))
        return found

    def take_written(self) -> list[Written]:
        """What became of entries since the last call, in the order in which they were offered."""
        with self._changed:
            written, self._written = self._written, []
            return written

    def drain(self, timeout_s: float | None = None) -> bool:
        """Write what is queued, without pauses; whether all of it was done in time."""
        with self._changed:
            self._hurries = True
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: not self._queue, timeout_s)
            self._hurries = False
            return done

    def close(self, timeout_s: float | None = None) -> bool:
        """Drain, give up what was not written in time, and end the thread. The store stays open."""
        done = self.drain(timeout_s)
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join()
        return done

    def _run(self) -> None:
        while (queued := self._next()) is not None:
            began = time.monotonic()
            kept = self._write(queued)
            with self._changed:
                del self._queue[queued.entry.key]
                self._queued_bytes -= queued.entry.nbytes
                self._written.append(Written(queued.entry.key, kept))
                self._changed.notify_all()
            self._told()
            self._pause(began + queued.entry.nbytes / self.bytes_per_second)

    def _next(self) -> Loaded | None:
        """The oldest in the queue; None when it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._ends)
            return None if self._ends else next(iter(self._queue.values()))

    def _write(self, queued: Loaded) -> bool:
        try:
            return self.store.write(queued.entry, [array.data for array in queued.arrays])
        except Exception:  # a mistake of ours: this entry is lost, the others are not
            logger.exception("an entry could not be written")
            return False

    def _pause(self, until: float) -> None:
        with self._changed:
            while not (self._hurries or self._ends):
                left = until - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(left)


def _copied(queued: Loaded, into: Destination) -> Loaded:
    for array, part in zip(queued.arrays, into, strict=True):
        part[:] = array.data
    return as_loaded(queued.entry, into)
