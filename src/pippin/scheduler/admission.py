"""Who may start next: the queue, its order and the byte budget. Knows no arrays.

Order: the longest prefix already in the tree first, so that hits are used before they are evicted,
but nobody is passed over more than `MAX_PASSED_OVER` times. A request that shares an uncomputed
prefix with one that is computing it waits for that one instead of computing it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pippin.cache.prefix_cache import Match, PrefixCache
from pippin.scheduler.request import Phase, Request
from pippin.types import GRID, ModelSpec

LOOKAHEAD = 16  # queued requests considered at a time
MAX_PASSED_OVER = 8
GROWTH_TOKENS = 256  # a running request's reservation grows by this much at a time


@dataclass
class ByteBudget:
    """One budget over working rows and the tree; weights are already taken off `capacity`."""

    spec: ModelSpec
    capacity: int
    cache: PrefixCache | None
    reserved: int = 0

    def row_bytes(self, num_tokens: int) -> int:
        """What one running request of `num_tokens` occupies, rows and transients together."""
        spec = self.spec
        windowed = min(num_tokens, spec.window + GRID) * spec.window_bytes_per_token
        tokens = -(-num_tokens // GRID) * GRID + GRID  # padded main and the tail
        return tokens * spec.kv_bytes_per_token + windowed + 2 * spec.state_bytes

    def fits_alone(self, num_tokens: int) -> bool:
        return self.row_bytes(num_tokens) <= self.capacity

    def try_reserve(self, request: Request, num_tokens: int) -> bool:
        """Grow the request's reservation to `num_tokens`, evicting from the tree if need be."""
        extra = self.row_bytes(num_tokens) - request.reserved_bytes
        if extra <= 0:
            return True
        left_for_cache = self.capacity - self.reserved - extra
        if left_for_cache < 0:
            return False
        if self.cache is not None:
            excess = self.cache.nbytes - left_for_cache
            if excess > 0:
                self.cache.evict(excess)
                if self.cache.nbytes > left_for_cache:
                    return False
            self.cache.set_capacity(left_for_cache)
        self.reserved += extra
        request.reserved_bytes += extra
        request.reserved_tokens = num_tokens
        return True

    def release(self, request: Request) -> None:
        self.reserved -= request.reserved_bytes
        request.reserved_bytes = 0
        if self.cache is not None:
            self.cache.set_capacity(self.capacity - self.reserved)


def common_prefix_len(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(np.argmax(differs)) if differs.any() else n


class Admission:
    """The waiting queue. `pick` returns the next request to start and what it matched."""

    def __init__(self, budget: ByteBudget, cache: PrefixCache | None) -> None:
        self._budget = budget
        self._cache = cache
        self.queue: list[Request] = []

    def add(self, request: Request) -> None:
        self.queue.append(request)

    def remove(self, request: Request) -> None:
        self.queue.remove(request)

    def pick(self, in_flight: Iterable[Request]) -> tuple[Request, Match | None] | None:
        """The best request that may start now, already reserved and off the queue."""
        computing = [r for r in in_flight if r.phase is Phase.PREFILL or r.will_be_cached]
        for request, shared_len in self._ranked():
            if self._should_wait(request, shared_len, computing):
                continue
            match = self._match(request)
            start_len = min(request.max_total, request.prompt_len + GROWTH_TOKENS)
            lock = self._cache.lock(match) if self._cache and match else None
            if not self._budget.try_reserve(request, start_len):
                if self._cache and lock:
                    self._cache.unlock(lock)
                return None  # the head of the order does not fit: nobody may overtake it for long
            request.lock = lock
            self._note_passed_over(request)
            self.queue.remove(request)
            return request, match
        return None

    def _ranked(self) -> list[tuple[Request, int]]:
        """Candidates with the length they would match, best first."""
        found = [(request, self._probe(request)) for request in self.queue[:LOOKAHEAD]]
        # Stable sort: equals stay in order of arrival; those passed over too often come first.
        return sorted(found, key=lambda pair: (pair[0].passed_over < MAX_PASSED_OVER, -pair[1]))

    def _uses_cache(self, request: Request) -> bool:
        # Prompt logprobs need the logits of every position: all of it is computed.
        return self._cache is not None and not request.wants_prompt_logprobs

    def _probe(self, request: Request) -> int:
        if self._cache is None or not self._uses_cache(request):
            return 0
        return self._cache.probe(request.prompt, limit=request.prompt_len - 1)

    def _match(self, request: Request) -> Match | None:
        if self._cache is None or not self._uses_cache(request):
            return None
        return self._cache.match(request.prompt, limit=request.prompt_len - 1)

    def _should_wait(self, request: Request, matched: int, computing: list[Request]) -> bool:
        if not self._uses_cache(request):
            return False
        for other in computing:
            known = other.prompt if other.phase is Phase.PREFILL else other.tokens(other.num_tokens)
            if len(known) <= max(matched + GRID, other.in_tree):
                continue
            shared = common_prefix_len(request.prompt[: request.prompt_len - 1], known)
            if shared >= matched + GRID and shared > other.in_tree:
                return True
        return False

    def _note_passed_over(self, chosen: Request) -> None:
        for request in self.queue:
            if request is chosen:
                return
            request.passed_over += 1
