"""The toy's device: a queue of work in launch order, and tokens by slot. Knows no model.

`launch` only enqueues; work runs in `wait` or `advance`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter, sleep

import numpy as np


class FakeDevice:
    def __init__(self, step_seconds: float = 0.0) -> None:
        """`step_seconds`: a step ends so long after its launch, or after the one before it."""
        self._step_seconds = step_seconds
        self._last: tuple[int, float] = (-1, 0.0)  # the last step, and when it ends
        self._ends: dict[int, float] = {}  # on time.perf_counter()
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()
        self.done_step = -1
        self.tokens_run = 0  # tokens put through the toy model: the honest count of work

    def enqueue(self, step: int, work: Callable[[], None]) -> None:
        if self._step_seconds and step != self._last[0]:
            end = self._ends[step] = max(perf_counter(), self._last[1]) + self._step_seconds
            self._last = step, end
        self._queue.append((step, work))

    def advance(self, num_items: int = 1) -> None:
        for _ in range(min(num_items, len(self._queue))):
            step, work = self._queue.popleft()
            work()
            if not self._queue or self._queue[0][0] != step:
                self.done_step = step

    def run_until(self, step: int) -> None:
        if (end := self._ends.pop(step, None)) is not None:
            sleep(max(0.0, end - perf_counter()))
        while self._queue and self._queue[0][0] <= step:
            self.advance()


class FutureMap:
    """The sampled token of each slot, and drafts behind it.

    What was read is poisoned: reading it twice raises.
    """

    POISON = -1

    def __init__(self, num_slots: int, max_depth: int = 0) -> None:
        self._tokens = np.full(num_slots + 1, self.POISON, dtype=np.int64)
        self._drafts = np.full((num_slots + 1, max_depth), self.POISON, dtype=np.int64)

    def stash(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        if len(slots):
            self._tokens[slots] = np.asarray(tokens).reshape(-1).astype(self._tokens.dtype)

    def take(self, slot: int) -> int:
        token = int(self._tokens[slot])
        if token == self.POISON:
            raise RuntimeError(f"slot {slot} has no token to read, or it was read twice")
        self._tokens[slot] = self.POISON
        return token

    def peek(self, slot: int) -> int:
        return int(self._tokens[slot])

    def stash_drafts(self, slot: int, drafts: Sequence[int]) -> None:
        self._drafts[slot] = self.POISON
        self._drafts[slot, : len(drafts)] = drafts

    def take_drafts(self, slot: int, depth: int) -> list[int]:
        drafts: list[int] = self._drafts[slot, :depth].tolist()
        if self.POISON in drafts:
            raise RuntimeError(
                f"slot {slot} has no {depth} drafts to read, or they were read twice"
            )
        self._drafts[slot] = self.POISON
        return drafts
