"""Reads many entries beside each other. Knows where they lie, not how they are found.

Copying from the page cache and hashing both work without Python's lock, so a few threads read as
fast as memory does. Memory that is used for the first time costs a page fault for every 4 KB, about
as much as the copy: whoever reads often gives its own (`into`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np

from pippin.cache.disk.base import Destination
from pippin.cache.disk.segments.segment import Slot

NUM_THREADS = 8
ALONE_BYTES = 1 << 20  # less than this is read by the caller

Outcome = Literal["read", "damaged", "refused"]


class Readers:
    def __init__(self) -> None:
        workers = min(NUM_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="pippin-disk-read")

    def read(self, jobs: Sequence[tuple[Slot, Destination]]) -> list[Outcome]:
        """Fetch and verify each; the caller has pinned their segments."""
        if len(jobs) < 2 or sum(slot.entry.nbytes for slot, _ in jobs) < ALONE_BYTES:
            return [_read(*job) for job in jobs]
        return list(self._pool.map(lambda job: _read(*job), jobs))

    def close(self) -> None:
        self._pool.shutdown()


def _read(slot: Slot, into: Destination) -> Outcome:
    try:
        return "read" if slot.segment.read(slot, into) else "damaged"
    except OSError:
        return "refused"


def new_destination(slot: Slot) -> Destination:
    return [np.empty(spec.nbytes, np.uint8) for spec in slot.entry.arrays]
