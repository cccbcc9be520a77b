"""Admission: the queue, its bounds, and which request starts next. Knows no arrays.

A request that could start is an `Offer`: what it would find in the tree, and so what would have to
be computed for it. Offers are tried in this order:

    priority, the highest first
    those preempted, and those passed over `MAX_PASSED_OVER` times, in order of arrival
    the fewest tokens to compute, so that hits are used before they are evicted; then arrival

One that does not fit is passed over by smaller ones behind it, which ages it; one that may not be
passed over any more, or that has a higher priority, holds the others up instead. A request that
shares an uncomputed prefix with one that is computing it waits instead of computing it again: it is
set aside until that prefix is in the tree, so that those behind it are considered.
"""

from __future__ import annotations

import bisect

from pippin.backends.base import Costs
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.results import Match
from pippin.errors import ContextOverflow, OutOfMemory, Overloaded, UnsupportedField
from pippin.messages import TOKEN_BYTES, Submit
from pippin.scheduler.memory.byte_budget import ByteBudget
from pippin.scheduler.memory.claims import GROWTH_TOKENS
from pippin.scheduler.planning.inflight_prefixes import InflightPrefixes, Promise, Waiters
from pippin.scheduler.planning.offer import Offer
from pippin.scheduler.request import Request
from pippin.scheduler.running_slot import RunningSlot
from pippin.scheduler.scheduler_limits import Limits
from pippin.scheduler.slot_pool import SlotPool
from pippin.types import GRID

LOOKAHEAD = 16  # queued requests considered at a time,
MAX_EXAMINED = 64  # with those that are found to share an in-flight prefix, and set aside
MAX_DOUBLINGS = 16  # of what a request that was preempted claims for its reply, each time
PROBED_TOKENS = 1 << 15  # of a plan: looking prompts up costs host time by their lengths


class Admission:
    """The waiting queue. `start_next` takes a request off it and gives it what it needs."""

    def __init__(
        self,
        costs: Costs,
        budget: ByteBudget,
        slots: SlotPool,
        cache: PrefixCache | None,
        limits: Limits,
    ) -> None:
        self._costs = costs
        self._budget = budget
        self._slots = slots
        self._cache = cache
        self._limits = limits
        self._deterministic = limits.deterministic
        self._hints: dict[Request, tuple[int, int]] = {}  # the cache's version, tokens matched
        self._offers: list[Offer] = []  # of the first of those eligible, in their order,
        self._offered_in: InflightPrefixes | None = None  # in the plan that has these
        self._refused_at: int | None = None  # bytes available when no request could start
        self.refused: Request | None = None  # the first that did not fit then
        self.queue: list[Request] = []  # by seniority
        self.eligible: list[Request] = []  # of these, those not set aside
        self.waiters = Waiters()  # those set aside
        self.num_tokens = 0  # in the queue

    # ---- the queue -------------------------------------------------------------------------

    def check(self, submit: Submit, *, num_coming: int = 0, num_coming_tokens: int = 0) -> None:
        """Raise for a request that could never start, or that finds the queue full.

        `num_coming` others will be in the queue soon, with `num_coming_tokens` in all: something is
        compiled or loaded for them.
        """
        prompt_len, max_tokens = submit.prompt_len, submit.params.max_tokens
        max_len = self._costs.spec.max_len
        if prompt_len + max_tokens > max_len:
            raise ContextOverflow(
                f"prompt is {prompt_len:,} tokens and max_tokens {max_tokens:,}, "
                f"the model holds {max_len:,}"
            )
        if submit.embeds and not self._costs.spec.hidden_bytes:
            raise UnsupportedField(
                "this model gives no embeddings: the input of its head cannot be identified",
                param="model",
            )
        need, capacity = self._costs.row_bytes(prompt_len + 1), self._budget.capacity
        if need > capacity:
            raise OutOfMemory(f"the request needs {need:,} bytes, the budget holds {capacity:,}")
        limits, waiting = self._limits, len(self.queue) + num_coming
        if waiting >= limits.max_queue:
            raise Overloaded(
                f"{waiting:,} requests are waiting, the queue holds {limits.max_queue:,}"
            )
        num_new = prompt_len + len(submit.prediction) // TOKEN_BYTES
        num_tokens = self.num_tokens + num_coming_tokens
        if waiting and num_tokens + num_new > limits.max_queue_tokens:
            raise Overloaded(
                f"requests of {num_tokens:,} tokens are waiting and this one has "
                f"{num_new:,}, the queue holds {limits.max_queue_tokens:,}"
            )

    def add(self, request: Request) -> None:
        """Also a request that was preempted: its arrival puts it first."""
        bisect.insort(self.queue, request, key=_rank)
        bisect.insort(self.eligible, request, key=_rank)
        self.num_tokens += request.num_queued
        self._refused_at = self._offered_in = None

    def remove(self, request: Request) -> None:
        _remove(self.queue, request)
        if request in self.waiters:
            self.waiters.remove(request)
        else:
            _remove(self.eligible, request)
        self.num_tokens -= request.num_queued
        self._hints.pop(request, None)
        self._refused_at = self.refused = self._offered_in = None

    # ---- who starts ------------------------------------------------------------------------

    def start_next(
        self, inflight: InflightPrefixes, *, nothing_runs: bool, max_to_compute: int | None = None
    ) -> RunningSlot | None:
        """The best offer that can be claimed now, off the queue and in its slot.

        `inflight` may bring prefixes worth waiting for. While nothing runs, a request starts with
        as little as it can, and gives up its match before it gives up. `max_to_compute`: only so
        little is left of a step that longer ones had better wait for the next.
        """
        self._take_ready()
        if not nothing_runs and self._still_refused:
            return None
        num_waiters = len(self.waiters)
        self._offer_more(inflight)
        self.refused = None
        for offer in sorted(self._offers, key=lambda offer: offer.order):
            if max_to_compute is not None and offer.num_to_compute > max_to_compute:
                if offer.is_firm:
                    return None
                continue
            running = self._claim(offer.request, nothing_runs=nothing_runs)
            if running is not None:
                self._start(running)
                self._offers.remove(offer)
                self._offered_in = inflight  # the others are still the first of those eligible
                return running
            self.refused = self.refused or offer.request
            if offer.is_firm or offer.request.priority > self.queue[-1].priority:
                break  # smaller ones may not pass it
        if len(self.waiters) == num_waiters and max_to_compute is None:
            self._refused_at = self._budget.available
        return None

    def may_start(self) -> bool:
        """Whether a request might start: some neither wait by choice nor were refused for want of
        bytes that are still taken."""
        self._take_ready()
        return bool(self.eligible) and not self._still_refused

    def considered(self) -> list[Request]:
        return self.eligible[:LOOKAHEAD]

    def shortest(self, priority: int) -> int | None:
        """The fewest tokens that one of those considered would have to compute, of those that have
        this priority or a higher one."""
        considered = (r for r in self.considered() if r.priority >= priority)
        found = (r.num_tokens - self._hints.get(r, (0, 0))[1] for r in considered)
        return min(found, default=None)

    @property
    def top_priority(self) -> int | None:
        """The highest of those eligible; None if there is none."""
        return self.eligible[0].priority if self.eligible else None

    @property
    def _still_refused(self) -> bool:
        """No request could start, none arrived since, and no bytes were released."""
        return self._refused_at is not None and self._budget.available <= self._refused_at

    def _take_ready(self) -> None:
        """Those that need not wait any longer are eligible again."""
        for request in self.waiters.take_ready():
            bisect.insort(self.eligible, request, key=_rank)
            self._refused_at = self._offered_in = None

    def _offer_more(self, inflight: InflightPrefixes) -> None:
        """As many as are considered now. Those that had better wait are set aside.

        In one plan a request is looked at once: later, what started since is all that can differ.
        """
        probed = 0
        waits: list[tuple[Request, Promise]] = []
        offers = self._still_offered(inflight, waits) if self._offered_in is inflight else []
        current = 0 if self._cache is None else self._cache.tree.version
        examined = len(offers) + len(waits)
        most = examined + MAX_EXAMINED - len(offers)
        while examined < min(most, len(self.eligible)) and len(offers) < LOOKAHEAD:
            request = self.eligible[examined]
            examined += 1
            version, matched = self._hints.get(request, (-1, 0))
            if version != current and probed < PROBED_TOKENS:
                probed += request.num_tokens
                matched = self._probe(request)
                self._hints[request] = current, matched
            offer = Offer(request, matched)
            if inflight and (promise := self._promise(offer, inflight)) is not None:
                waits.append((request, promise))
                continue
            offers.append(offer)
        if waits:
            self.eligible[:examined] = [offer.request for offer in offers]
        for request, promise in waits:
            self.waiters.add(request, promise)
        self._offers, self._offered_in = offers, inflight

    def _still_offered(
        self, inflight: InflightPrefixes, waits: list[tuple[Request, Promise]]
    ) -> list[Offer]:
        """Of those offered before, less those that now wait for what started last."""
        key = inflight.last_key
        offers: list[Offer] = []
        for offer in self._offers:
            promise = self._promise(offer, inflight) if key and offer.request.key == key else None
            if promise is None:
                offers.append(offer)
            else:
                waits.append((offer.request, promise))
        return offers

    def _claim(self, request: Request, *, nothing_runs: bool) -> RunningSlot | None:
        whole, least = request.max_total, request.num_tokens + 1
        ahead = GROWTH_TOKENS << min(request.num_preemptions, MAX_DOUBLINGS)
        wanted = whole if self._deterministic else min(whole, request.num_tokens + ahead)
        running = self._try(request, wanted, use_match=True)
        if running is None and nothing_runs:
            running = self._try(request, least, use_match=True)
            running = running or self._try(request, least, use_match=False)
        return running

    def _try(self, request: Request, row_tokens: int, *, use_match: bool) -> RunningSlot | None:
        """Bytes for a row of so many tokens, the match locked and a slot; or nothing at all."""
        # Locking a match takes it out of what can be evicted, so this much at least is needed.
        borrows = use_match and self._costs.restores_by_reference
        if not borrows and self._costs.row_bytes(row_tokens) > self._budget.available:
            return None
        match = self._match(request) if use_match else None
        lock = None
        if self._cache is not None and match is not None:
            lock = self._cache.lock(match)
        length = 0 if match is None else match.length
        nbytes = self._costs.row_bytes(row_tokens, length)
        if not self._budget.claim(nbytes):
            if self._cache is not None and lock is not None:
                self._cache.unlock(lock)
            return None
        return RunningSlot(
            request,
            slot=self._slots.acquire(),
            prefill_len=request.num_tokens,
            nbytes=nbytes,
            row_tokens=row_tokens,
            lock=lock,
            start_len=length,
            capture_len=self._capture_len(request),
            keeps_reply=not self._deterministic,
            branch=0 if match is None else match.branch,
        )

    def _start(self, running: RunningSlot) -> None:
        """Off the queue. Earlier ones were passed over, unless they wait by choice."""
        request = running.request
        for earlier in self.eligible[: _place(self.eligible, request)]:
            earlier.passed_over += 1
        self.remove(request)
        request.start(running.slot, running.start_len)

    # ---- what the tree has -----------------------------------------------------------------

    def _probe(self, request: Request) -> int:
        if self._cache is None or request.wants_prompt_logprobs:
            return 0
        return self._cache.probe_prompt(request.tokens(request.num_tokens), request.salt)

    def _match(self, request: Request) -> Match | None:
        if self._cache is None or request.wants_prompt_logprobs:
            return None
        tokens = request.tokens(request.num_tokens)
        match = self._cache.match_prompt(tokens, request.salt)
        if self._deterministic and match.length % GRID:  # whole blocks alone are computed alike
            limit = match.length - match.length % GRID
            match = self._cache.match(tokens, request.salt, limit=limit)
        return match

    def _capture_len(self, request: Request) -> int:
        """How much of what it starts with its chunks will bring the tree."""
        if self._cache is None or request.wants_prompt_logprobs:
            return 0
        num_tokens = request.num_tokens
        return num_tokens - num_tokens % GRID if self._deterministic else num_tokens

    def _promise(self, offer: Offer, inflight: InflightPrefixes) -> Promise | None:
        if self._cache is None or offer.request.wants_prompt_logprobs:
            return None
        return inflight.promise(
            offer.request,
            offer.matched,
            knows_head=self._costs.spec.hidden_bytes > 0,
            deterministic=self._deterministic,
        )


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


def _place(ranked: list[Request], request: Request) -> int:
    return bisect.bisect_left(ranked, request.rank, key=_rank)


def _remove(ranked: list[Request], request: Request) -> None:
    place = _place(ranked, request)
    assert ranked[place] is request
    del ranked[place]
