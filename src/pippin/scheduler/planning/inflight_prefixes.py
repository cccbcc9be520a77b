"""Prefixes that running requests are bringing into the tree, and who had better wait for one."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from pippin.scheduler.request import KEY_TOKENS, Request
from pippin.scheduler.running_slot import RunningSlot
from pippin.types import GRID

REPLY_TOKENS = KEY_TOKENS  # of a reply that are worth a wait of two steps; fewer are not seen


class InflightPrefixes:
    def __init__(self, running_slots: Iterable[RunningSlot]) -> None:
        self._bringing: dict[bytes, list[RunningSlot]] = {}  # by `Request.key`
        self.last_key = b""  # of the one that was added last
        for running in running_slots:
            if running.inflight_len > running.in_tree:
                self.add(running)

    def __len__(self) -> int:
        return len(self._bringing)

    def add(self, running: RunningSlot) -> None:
        self.last_key = running.request.key
        if key := running.request.key:
            self._bringing.setdefault(key, []).append(running)

    def promise(
        self, request: Request, matched: int, *, knows_head: bool, deterministic: bool
    ) -> Promise | None:
        """Who is about to bring at least a block more than the tree has now.

        Less is worth a wait if it is a whole reply, which comes with the next step or the one after
        it, and whose end is what the next turn of a conversation continues; or this very prompt.
        """
        for other in self._bringing.get(request.key, ()):
            inflight_len = other.inflight_len
            needed = matched + GRID
            same_prompt = knows_head and other.prefill_len == request.num_tokens
            if (other.request.completed or same_prompt) and not deterministic:
                needed = min(needed, max(inflight_len, matched + REPLY_TOKENS))
            if inflight_len <= other.in_tree or inflight_len < needed:
                continue
            tokens = request.tokens(request.num_tokens)
            shared = common_prefix_len(tokens, other.request.tokens(inflight_len))
            if shared >= needed and shared > other.in_tree:
                return Promise(other, shared, inflight_len)
        return None


@dataclass(frozen=True)
class Promise:
    running: RunningSlot
    shared: int  # tokens that it brings to a request that waits,
    inflight_len: int  # of so many in all


class Waiters:
    """Requests that wait by choice for a prefix that a running request brings.

    Nothing is done for them in a step that does not bring it. The running request has the highest
    priority of those that wait for it.
    """

    def __init__(self) -> None:
        self._promises: dict[Request, Promise] = {}
        # By what is shared with each; ended waits are dropped when they are met.
        self._heaps: dict[RunningSlot, list[tuple[int, int, Request]]] = {}

    def __len__(self) -> int:
        return len(self._promises)

    def __contains__(self, request: Request) -> bool:
        return request in self._promises

    def pairs(self) -> Iterator[tuple[Request, RunningSlot]]:
        """Each request and what it waits for."""
        return ((request, promise.running) for request, promise in self._promises.items())

    def add(self, request: Request, promise: Promise) -> None:
        self._promises[request] = promise
        heap = self._heaps.setdefault(promise.running, [])
        heapq.heappush(heap, (promise.shared, request.arrival, request))
        promise.running.inherit(request.priority)

    def remove(self, request: Request) -> None:
        running = self._promises.pop(request).running
        if running.inherited == request.priority:
            self._inherit(running)

    def take_ready(self) -> list[Request]:
        """Those whose prefix is in the tree by now, or will not arrive any more."""
        ready: list[Request] = []
        for running, heap in list(self._heaps.items()):
            before = len(ready)
            while heap and self._is_over(running, heap[0]):
                *_, request = heapq.heappop(heap)
                if self._waits_for(request, running):
                    del self._promises[request]
                    ready.append(request)
            if not heap:
                del self._heaps[running]
            if len(ready) > before:
                self._inherit(running)
        return ready

    def _is_over(self, running: RunningSlot, entry: tuple[int, int, Request]) -> bool:
        shared, _, request = entry
        if running.released or not self._waits_for(request, running) or shared <= running.in_tree:
            return True
        return running.inflight_len < self._promises[request].inflight_len

    def _waits_for(self, request: Request, running: RunningSlot) -> bool:
        promise = self._promises.get(request)
        return promise is not None and promise.running is running

    def _inherit(self, running: RunningSlot) -> None:
        running.inherited = None
        for *_, request in self._heaps.get(running, ()):
            if self._waits_for(request, running):
                running.inherit(request.priority)


def common_prefix_len(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(np.argmax(differs)) if differs.any() else n
