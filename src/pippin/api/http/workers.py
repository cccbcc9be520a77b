"""Threads for what takes long to check and to tokenize.

Other clients' streams must not wait for it. Python runs one thread at a time, and each that
computes holds the event loop up for some milliseconds: so large bodies wait for each other. What
they are decoded to takes up to twenty times their bytes: one is for each thread.
"""

from __future__ import annotations

import asyncio
import ctypes
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
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
        self._small_decoded = asyncio.Semaphore(NUM_SMALL)
        self._large_decoded = asyncio.Semaphore(NUM_LARGE)

    async def run(self, work: Callable[[bytearray], T], body: bytearray) -> T:
        pool = self._large if len(body) > LARGE_BYTES else self._small
        return await asyncio.get_running_loop().run_in_executor(pool, work, body)

    def decoded(self, body: bytearray) -> AbstractAsyncContextManager[None]:
        """While what a body is decoded to is in memory."""
        return self._large_decoded if len(body) > LARGE_BYTES else self._small_decoded


# mallopt(3)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_SETTINGS = {
    _ARENA_MAX: 1 + NUM_THREADS,
    _MMAP_THRESHOLD: 256 << 10,  # given back when it is freed; a fixed one does not grow by itself
    _TRIM_THRESHOLD: 8 << 20,  # of what is free at the end of the heap
}


def return_freed_memory() -> bool:
    """Before there are threads. False where there is no glibc."""
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    taken = [libc.mallopt(option, value) for option, value in _SETTINGS.items()]
    return all(taken)
