"""Makes glibc return what requests have freed. Knows no request.

Each thread that allocates gets an arena of its own, and what a large body leaves free in one is
neither used by the others nor returned: a server that has read some large bodies in each of its
threads would keep several times what it needs, for good.
"""

from __future__ import annotations

import ctypes
import platform

# mallopt(3)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_SETTINGS = {
    _ARENA_MAX: 1,
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
