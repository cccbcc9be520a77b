"""What the C library keeps of freed memory: enough to be fast, no more than the budget.

mlx's CPU allocator is plain malloc, and glibc maps every large buffer anew: each use then begins
with a page fault per 4 KiB. Prefill on a CPU spends a quarter of its time there, so glibc is set
to keep what is freed. But activations come and go between blocks that the prefix cache keeps for
long, and the holes they leave do not fit what comes next: the process would grow past the budget,
in steps, for as long as it runs. So the system is asked now and then how large it is, and when that
is too much, glibc gives back every page that is wholly free.
"""

from __future__ import annotations

import ctypes
import os
import platform

# mallopt(3)
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
_NEVER = 2**31 - 1

STEPS_BETWEEN_CHECKS = 8
SLACK_BYTES = 16 << 20  # to grow by before trimming is tried again, where it did not help enough


def has_glibc() -> bool:
    return platform.system() == "Linux" and platform.libc_ver()[0] == "glibc"


def keep_large_buffers() -> bool:
    """Tell glibc; False where there is no glibc to tell."""
    if not has_glibc():
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


class ResidentLimit:
    """Keeps the process within what it holds now and `room_bytes` more."""

    def __init__(self, room_bytes: int) -> None:
        self._trim = ctypes.CDLL(None).malloc_trim
        self._trim(0)  # loading leaves much behind
        self._max_bytes = resident_bytes() + room_bytes
        self._trimmed_to = 0
        self._steps = 0

    def keep(self) -> None:
        """Called every step; looks at every few of them."""
        self._steps = (self._steps + 1) % STEPS_BETWEEN_CHECKS
        if self._steps:
            return
        most = max(self._max_bytes, self._trimmed_to + SLACK_BYTES)
        if resident_bytes() > most:
            self._trim(0)
            self._trimmed_to = resident_bytes()


def resident_bytes() -> int:
    """What the system counts as this process's memory."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
