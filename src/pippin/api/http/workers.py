"""Threads for what takes long to check and to tokenize. Knows no requests.

Other clients' streams must not wait for it. Python runs one thread at a time, and each that
computes holds the event loop up for some milliseconds: so large bodies wait for each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
LARGE_BYTES = 256_000
SMALL_BYTES = 8_000  # decoded faster than a thread is reached
NUM_SMALL, NUM_LARGE = 4, 1  # threads, by the size of the bodies that they read
NUM_THREADS = NUM_SMALL + NUM_LARGE


class Workers:
    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(NUM_SMALL, thread_name_prefix="prepare")
        self._large = ThreadPoolExecutor(NUM_LARGE, thread_name_prefix="prepare-large")

    async def run(self, work: Callable[[bytes], T], body: bytes) -> T:
        pool = self._large if len(body) > LARGE_BYTES else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, work, body)
