"""A queued request that could start, and before which others. Knows no queue and no bytes."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from pippin.backends.base import Costs
from pippin.cache.prefix_cache import Match, PrefixCache
from pippin.errors import ContextOverflow, OutOfMemory, Overloaded, UnsupportedField
from pippin.messages import TOKEN_BYTES, Submit
from pippin.scheduler.memory import GROWTH_TOKENS
from pippin.scheduler.request import KEY_TOKENS, ByteBudget, Limits, Request, RunningSlot, SlotPool
from pippin.types import GRID

MAX_PASSED_OVER = 8


class Offer(msgspec.Struct, frozen=True, gc=False):  # many for each request that starts
    request: Request
    matched: int  # tokens that the tree seemed to hold when it was last asked

    @property
    def num_to_compute(self) -> int:
        return self.request.num_tokens - self.matched

    @property
    def is_firm(self) -> bool:
        """It may not be passed over any more."""
        request = self.request
        return request.num_preemptions > 0 or request.passed_over >= MAX_PASSED_OVER

    @property
    def order(self) -> tuple[int, int, int]:
        request = self.request
        if self.is_firm:
            return -request.priority, 0, request.arrival
        return -request.priority, 1, self.num_to_compute


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
