"""How long mlx's CPU device has had work: its thread's own clock. Knows no model.

On a CPU the device is one thread of mlx's that takes operations from a queue and sleeps when the
queue is empty. Linux keeps account of each thread: time on a core, and time ready but kept waiting
for one. The rest is sleep, so the device's idle time is read off, not estimated. GPUs keep no such
account; there is no clock then.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from pathlib import Path
from time import perf_counter

import mlx.core as mx

from pippin.backends.mlx.device import on_cpu
from pippin.types import DeviceReading

_TASKS = Path("/proc/self/task")
_PROBE_ELEMENTS = 1 << 16  # about half a millisecond of exp


class StreamClock:
    """Reads one thread's account; a reading takes a few microseconds."""

    def __init__(self, thread_id: int) -> None:
        self._file = os.open(_TASKS / str(thread_id) / "schedstat", os.O_RDONLY)

    def read(self) -> DeviceReading:
        return DeviceReading(perf_counter(), _nanoseconds(os.pread(self._file, 64, 0)) / 1e9)

    def close(self) -> None:
        os.close(self._file)


def find_stream_clock() -> StreamClock | None:
    """Of the thread that works for the caller's default stream; None where it has no account."""
    if not on_cpu() or not Path("/proc/self/schedstat").exists():
        return None
    thread_id = _find_thread(str(mx.default_stream(mx.cpu)))
    return None if thread_id is None else StreamClock(thread_id)


@cache  # a stream keeps its thread for as long as there is a process, and to find it takes 4 ms
def _find_thread(stream: str) -> int | None:
    """By giving it work: of all threads but this one, it is the one that was on a core most."""
    x = mx.zeros((_PROBE_ELEMENTS,))
    mx.eval(mx.exp(x))  # a first use may start threads
    before = _accounts()
    mx.eval(mx.exp(mx.exp(x)))
    worked = {tid: spent - before.get(tid, 0) for tid, spent in _accounts().items()}
    worked.pop(threading.get_native_id(), None)
    busiest = max(worked, key=lambda tid: worked[tid], default=None)
    return busiest if busiest is not None and worked[busiest] else None


def _accounts() -> dict[int, int]:
    """Nanoseconds by thread of this process."""
    accounts = {}
    for name in os.listdir(_TASKS):
        try:
            accounts[int(name)] = _nanoseconds((_TASKS / name / "schedstat").read_bytes())
        except FileNotFoundError:  # a thread that has just ended
            continue
    return accounts


def _nanoseconds(line: bytes) -> int:
    on_core, waiting_for_core, _ = line.split()
    return int(on_core) + int(waiting_for_core)
