"""Keeps large buffers in the process instead of handing them back to the system each time.

mlx's CPU allocator is plain malloc, and glibc maps every large buffer anew: each use then begins
with a page fault per 4 KiB. Prefill on a CPU spends a quarter of its time there. The price is that
the process keeps the most it ever used, which is what the byte budget bounds anyway.
"""

from __future__ import annotations

import ctypes
import platform

# mallopt(3)
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_NEVER = 2**31 - 1


def keep_large_buffers() -> bool:
    """Tell glibc; False where there is no glibc to tell."""
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    settings = {
        _MMAP_THRESHOLD: 1 << 30,
        _TRIM_THRESHOLD: _NEVER,
        _TOP_PAD: 64 << 20,
        _ARENA_MAX: 1,  # one thread allocates and another frees: two arenas would both grow
    }
    taken = [libc.mallopt(option, value) for option, value in settings.items()]
    return all(taken)
