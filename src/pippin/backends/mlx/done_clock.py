"""Notes when the device finished a step, though nobody is waiting for it at that moment.

MLX has no way to ask whether an array is ready, so one thread waits for each step's result in turn
and looks at the clock. Waiting for an array that is already on its way only waits; it launches
nothing, and mlx gives up the interpreter's lock meanwhile.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from time import perf_counter

import mlx.core as mx


@dataclass
class DoneTime:
    """time.perf_counter() when the device was done; 0.0 while it is not known."""

    seconds: float = 0.0


class DoneClock:
    def __init__(self) -> None:
        self._watched: queue.SimpleQueue[tuple[mx.array, DoneTime] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pippin-done-clock", daemon=True)
        self._thread.start()

    def watch(self, array: mx.array) -> DoneTime:
        """`array` must have been launched already."""
        done = DoneTime()
        self._watched.put((array, done))
        return done

    def close(self) -> None:
        self._watched.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._watched.get()) is not None:
            array, done = item
            mx.eval(array)
            done.seconds = perf_counter()
            del array, item  # nothing may hold a step's result longer than the step
