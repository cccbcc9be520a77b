"""Who may wait and who starts next: the queue and its order. Knows no arrays.

Order: the longest prefix already in the tree first, so that hits are used before they are evicted,
but nobody is passed over more than `MAX_PASSED_OVER` times. A request that shares an uncomputed
prefix with one that is computing it waits for that one instead of computing it again.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from pippin.cache.prefix_cache import Match, PrefixCache
from pippin.errors import ContextOverflow, OutOfMemory, Overloaded
from pippin.messages import Submit
from pippin.scheduler.budget import GROWTH_TOKENS, ByteBudget
from pippin.scheduler.request import Request
from pippin.types import GRID

LOOKAHEAD = 16  # queued requests considered at a time
MAX_PASSED_OVER = 8
REPLY_TOKENS = 16  # of a reply that are worth a wait of two steps


def common_prefix_len(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(np.argmax(differs)) if differs.any() else n


class Admission:
    """The waiting queue. `pick` returns the next request to start and what it matched."""

    def __init__(
        self,
        budget: ByteBudget,
        cache: PrefixCache | None,
        *,
        max_queue: int,
        on_grid: bool = False,
    ) -> None:
        self._budget = budget
        self._cache = cache
        self._max_queue = max_queue
        self._on_grid = on_grid  # match whole grid blocks only
        self.queue: list[Request] = []

    def check(self, submit: Submit) -> None:
        """Raise for a request that could never start, or that finds the queue full."""
        budget, queue_len = self._budget, len(self.queue)
        prompt_len, max_tokens = len(submit.tokens), submit.params.max_tokens
        if prompt_len + max_tokens > budget.spec.max_len:
            raise ContextOverflow(
                f"prompt is {prompt_len:,} tokens and max_tokens {max_tokens:,}, "
                f"the model holds {budget.spec.max_len:,}"
            )
        need = budget.row_bytes(prompt_len + 1)
        if need > budget.capacity:
            raise OutOfMemory(
                f"the request needs {need:,} bytes, the budget holds {budget.capacity:,}"
            )
        if queue_len >= self._max_queue:
            raise Overloaded(
                f"{queue_len:,} requests are waiting, the queue holds {self._max_queue:,}"
            )

    def add(self, request: Request) -> None:
        self.queue.append(request)

    def remove(self, request: Request) -> None:
        self.queue.remove(request)

    def pick(
        self, in_flight: Collection[Request], *, alone: bool
    ) -> tuple[Request, Match | None] | None:
        """The best request that may start now, already reserved and off the queue.

        `in_flight` may bring prefixes worth waiting for. With nobody else running (`alone`) a
        request starts with as little as it can, and gives up its match before it gives up.
        """
        waiting: set[Request] = set()
        for request, matched in self._ranked():
            if self._should_wait(request, matched, in_flight):
                waiting.add(request)
                continue
            started = self._reserve(request, use_match=True, tight=False)
            if not started and alone:
                started = self._reserve(request, use_match=True, tight=True)
                started = started or self._reserve(request, use_match=False, tight=True)
            if not started:
                return None  # the head of the order does not fit: nobody may overtake it
            self._note_passed_over(request, waiting)
            self.queue.remove(request)
            return request, started[0]
        return None

    def _reserve(
        self, request: Request, *, use_match: bool, tight: bool
    ) -> tuple[Match | None] | None:
        """Reserve bytes and lock the match; a 1-tuple of the match, or None if it does not fit."""
        growth = 1 if tight else GROWTH_TOKENS
        num_tokens = min(request.max_total, request.prompt_len + growth)
        if not self._budget.could_reserve(request, num_tokens):
            return None
        match = self._match(request) if use_match else None
        if self._cache is not None and match is not None:
            request.lock = self._cache.lock(match)
        if self._budget.try_reserve(request, num_tokens):
            return (match,)
        if self._cache is not None and request.lock is not None:
            self._cache.unlock(request.lock)
            request.lock = None
        return None

    def _ranked(self) -> list[tuple[Request, int]]:
        """Candidates with the length they would match, best first.

        Those passed over too often come before all others, in order of arrival, so that nobody
        is passed over once more. Stable sort: equals stay in order of arrival.
        """
        found = [(request, self._probe(request)) for request in self.queue[:LOOKAHEAD]]
        return sorted(
            found,
            key=lambda pair: (0, 0) if pair[0].passed_over >= MAX_PASSED_OVER else (1, -pair[1]),
        )

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
        match = self._cache.match(request.prompt, limit=request.prompt_len - 1)
        if self._on_grid and match.length % GRID:
            match = self._cache.match(request.prompt, limit=match.length - match.length % GRID)
        return match

    def _should_wait(self, request: Request, matched: int, in_flight: Collection[Request]) -> bool:
        """Whether somebody is about to bring at least a grid block more than the tree has now.

        Less is worth a wait if it is a whole reply: that comes with the next step or the one after
        it, and its end is what the next turn of a conversation continues.
        """
        if not self._uses_cache(request):
            return False
        usable = request.prompt[: request.prompt_len - 1]
        for other in in_flight:
            num_coming = other.num_coming
            needed = matched + GRID
            if other.will_be_cached and not self._on_grid:
                needed = min(needed, max(num_coming, matched + REPLY_TOKENS))
            if num_coming <= other.in_tree or num_coming < needed:
                continue
            shared = common_prefix_len(usable, other.tokens(num_coming))
            if shared >= needed and shared > other.in_tree:
                return True
        return False

    def _note_passed_over(self, chosen: Request, waiting: set[Request]) -> None:
        """Those that wait for a prefix by choice were not passed over."""
        for request in self.queue:
            if request is chosen:
                return
            request.passed_over += request not in waiting
