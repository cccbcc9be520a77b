"""Reads entries in several threads, block by block. Knows where they lie, not how they are found.

Copying from the page cache and hashing both work without Python's lock, so a few threads read as
fast as memory does, one large entry as well as many small ones. Memory that is used for the first
time costs a page fault for every 4 KB, about as much as the copy: whoever reads often gives its own
(`into`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Literal

import numpy as np

from pippin.cache.disk.segments.blocks import divided
from pippin.cache.disk.segments.segment import Slot
from pippin.cache.entries.entry_store import Destination

NUM_THREADS = 8
ALONE_BYTES = 1 << 20  # less than this is read by the caller

Outcome = Literal["read", "damaged", "refused"]


class _Reading:
    """One entry on its way: which blocks nobody has begun, and what was found of the others."""

    def __init__(self, slot: Slot, into: Destination) -> None:
        self._slot = slot
        self._blocks = divided(into)
        self._digests = [b""] * len(self._blocks)
        self._refused = False

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def read(self, number: int) -> None:
        if self._refused:
            return
        try:
            found = self._slot.segment.read_block(self._slot, self._blocks[number])
        except OSError:
            self._refused = True
        else:
            self._digests[number] = found

    def outcome(self) -> Outcome:
        if self._refused:
            return "refused"
        return "read" if self._slot.segment.verifies(self._slot, self._digests) else "damaged"


class Readers:
    def __init__(self) -> None:
        self._num_threads = min(NUM_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="pippin-disk-read")

    def read(self, jobs: Sequence[tuple[Slot, Destination]]) -> list[Outcome]:
        """Fetch and verify each; the caller, who reads too, has pinned their segments."""
        readings = [_Reading(*job) for job in jobs]
        blocks = [(reading, n) for reading in readings for n in range(reading.num_blocks)]
        blocks.reverse()  # taken from the end: as they lie on disk
        helpers: list[Future[None]] = []
        if sum(slot.entry.nbytes for slot, _ in jobs) >= ALONE_BYTES:
            most = min(self._num_threads, len(blocks))
            helpers = [self._pool.submit(_read_all, blocks) for _ in range(most - 1)]
        try:
            _read_all(blocks)
        finally:
            wait(helpers)  # nobody writes there any more when this returns
        for helper in helpers:
            helper.result()
        return [reading.outcome() for reading in readings]

    def close(self) -> None:
        self._pool.shutdown()


def _read_all(blocks: list[tuple[_Reading, int]]) -> None:
    """Take one block after the other, as others do, until none is left."""
    while True:
        try:
            reading, number = blocks.pop()
        except IndexError:
            return
        reading.read(number)


def new_destination(slot: Slot) -> Destination:
    return [np.empty(spec.nbytes, np.uint8) for spec in slot.entry.arrays]
