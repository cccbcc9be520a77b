"""Makes glibc return what requests have freed. Knows no request.

What a large body leaves free in an arena is neither used by the others nor returned: a server that
has read some large bodies in each of many threads would keep several times what it needs, for good.
With one arena for all, threads that tokenize wait for each other at every allocation.
"""

from __future__ import annotations

import ctypes
import platform

from pippin.api.http.workers import NUM_THREADS

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
