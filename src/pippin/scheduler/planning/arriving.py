"""Prefixes that running requests are bringing into the tree, and who had better wait for one."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from pippin.scheduler.holding import Holding
from pippin.scheduler.request import KEY_TOKENS, Request
from pippin.types import GRID

REPLY_TOKENS = KEY_TOKENS  # of a reply that are worth a wait of two steps; fewer are not seen


class Arriving:
    def __init__(self, holdings: Iterable[Holding]) -> None:
        self._bringing: dict[bytes, list[Holding]] = {}  # by `Request.key`
        for holding in holdings:
            if holding.num_arriving > holding.in_tree:
                self.add(holding)

    def __len__(self) -> int:
        return len(self._bringing)

    def add(self, holding: Holding) -> None:
        if key := holding.request.key:
            self._bringing.setdefault(key, []).append(holding)

    def promise(
        self, request: Request, matched: int, *, knows_head: bool, deterministic: bool
    ) -> Promise | None:
        """Who is about to bring at least a block more than the tree has now.

        Less is worth a wait if it is a whole reply, which comes with the next step or the one after
        it, and whose end is what the next turn of a conversation continues; or this very prompt.
        """
        for other in self._bringing.get(request.key, ()):
            num_arriving = other.num_arriving
            needed = matched + GRID
            same_prompt = knows_head and other.prefill_len == request.num_tokens
            if (other.request.completed or same_prompt) and not deterministic:
                needed = min(needed, max(num_arriving, matched + REPLY_TOKENS))
            if num_arriving <= other.in_tree or num_arriving < needed:
                continue
            tokens = request.tokens(request.num_tokens)
            shared = common_prefix_len(tokens, other.request.tokens(num_arriving))
            if shared >= needed and shared > other.in_tree:
                return Promise(other, shared, num_arriving)
        return None


@dataclass(frozen=True)
class Promise:
    holding: Holding
    shared: int  # tokens that it brings to a request that waits,
    num_arriving: int  # of so many in all


class Waiters:
    """Requests that wait by choice for a prefix that a running request brings.

    Nothing is done for them in a step that does not bring it. The running request has the highest
    priority of those that wait for it.
    """

    def __init__(self) -> None:
        self._promises: dict[Request, Promise] = {}
        # For each holding, by what is shared with it; ended waits are dropped when they are met.
        self._heaps: dict[Holding, list[tuple[int, int, Request]]] = {}

    def __len__(self) -> int:
        return len(self._promises)

    def __contains__(self, request: Request) -> bool:
        return request in self._promises

    def pairs(self) -> Iterator[tuple[Request, Holding]]:
        """Each request and what it waits for."""
        return ((request, promise.holding) for request, promise in self._promises.items())

    def add(self, request: Request, promise: Promise) -> None:
        self._promises[request] = promise
        heap = self._heaps.setdefault(promise.holding, [])
        heapq.heappush(heap, (promise.shared, request.arrival, request))
        promise.holding.inherit(request.priority)

    def remove(self, request: Request) -> None:
        holding = self._promises.pop(request).holding
        if holding.inherited == request.priority:
            self._inherit(holding)

    def take_ready(self) -> list[Request]:
        """Those whose prefix is in the tree by now, or will not arrive any more."""
        ready: list[Request] = []
        for holding, heap in list(self._heaps.items()):
            before = len(ready)
            while heap and self._is_over(holding, heap[0]):
                *_, request = heapq.heappop(heap)
                if self._waits_for(request, holding):
                    del self._promises[request]
                    ready.append(request)
            if not heap:
                del self._heaps[holding]
            if len(ready) > before:
                self._inherit(holding)
        return ready

    def _is_over(self, holding: Holding, entry: tuple[int, int, Request]) -> bool:
        shared, _, request = entry
        if holding.released or not self._waits_for(request, holding) or shared <= holding.in_tree:
            return True
        return holding.num_arriving < self._promises[request].num_arriving

    def _waits_for(self, request: Request, holding: Holding) -> bool:
        promise = self._promises.get(request)
        return promise is not None and promise.holding is holding

    def _inherit(self, holding: Holding) -> None:
        holding.inherited = None
        for *_, request in self._heaps.get(holding, ()):
            if self._waits_for(request, holding):
                holding.inherit(request.priority)


def common_prefix_len(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(np.argmax(differs)) if differs.any() else n
