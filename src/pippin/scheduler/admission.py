"""The waiting queue: which request starts next, and what it gets."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pippin.backends.base import Costs
from pippin.cache.prefix_cache import PrefixCache
from pippin.errors import ContextOverflow, OutOfMemory, Overloaded, UnsupportedField
from pippin.messages import TOKEN_BYTES, Submit
from pippin.scheduler.memory import GROWTH_TOKENS
from pippin.scheduler.request import (
    KEY_TOKENS,
    ByteBudget,
    Limits,
    Promise,
    Request,
    RunningSlot,
    SlotPool,
    Stage,
)
from pippin.types import GRID

MAX_PASSED_OVER = 8
LOOKAHEAD = 16  # queued requests considered at a time,
MAX_EXAMINED = 64  # with those that are found to share an in-flight prefix, and set aside
MAX_DOUBLINGS = 16  # of what a request that was preempted claims for its reply, each time
PROBED_TOKENS = 1 << 15  # of a plan: looking prompts up costs host time by their lengths
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


def common_prefix_len(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(np.argmax(differs)) if differs.any() else n


@dataclass
class Admission:
    costs: Costs
    budget: ByteBudget
    slots: SlotPool
    cache: PrefixCache | None
    limits: Limits
    queue: list[Request] = field(default_factory=list)  # by seniority
    eligible: list[Request] = field(default_factory=list)  # of these, those not set aside
    num_tokens: int = 0  # in the queue
    refused: Request | None = None  # the first that did not fit when no request could start
    _refused_at: int | None = None  # bytes available then
    # The cache's version, and tokens matched.
    _hints: dict[Request, tuple[int, int]] = field(default_factory=dict)
    _offers: list[Request] = field(default_factory=list)  # the first of those eligible,
    _offered_in: InflightPrefixes | None = None  # in the plan that has these
    # Requests that wait by choice for a prefix are set aside: nothing is done for them in a step
    # that does not bring it. What they wait for:
    _awaited: dict[RunningSlot, None] = field(default_factory=dict)

    # ---- the queue -------------------------------------------------------------------------

    def check(self, submit: Submit, coming: Sequence[Request] = ()) -> None:
        """Raise for a request that could never start, or that finds the queue full, with those that
        are `coming`."""
        prompt_len, max_tokens = submit.prompt_len, submit.params.max_tokens
        max_len = self.costs.spec.max_len
        if prompt_len + max_tokens > max_len:
            raise ContextOverflow(
                f"prompt is {prompt_len:,} tokens and max_tokens {max_tokens:,}, "
                f"the model holds {max_len:,}"
            )
        if submit.embeds and not self.costs.spec.hidden_bytes:
            raise UnsupportedField(
                "this model gives no embeddings: the input of its head cannot be identified",
                param="model",
            )
        need, capacity = self.costs.row_bytes(prompt_len + 1), self.budget.capacity
        if need > capacity:
            raise OutOfMemory(f"the request needs {need:,} bytes, the budget holds {capacity:,}")
        limits, waiting = self.limits, len(self.queue) + len(coming)
        if waiting >= limits.max_queue:
            raise Overloaded(
                f"{waiting:,} requests are waiting, the queue holds {limits.max_queue:,}"
            )
        num_new = prompt_len + len(submit.prediction) // TOKEN_BYTES
        num_tokens = self.num_tokens + sum(request.num_queued for request in coming)
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
        if request.promise is None:
            _remove(self.eligible, request)
        request.promise = None
        self.num_tokens -= request.num_queued
        self._hints.pop(request, None)
        self._refused_at = self.refused = self._offered_in = None

    @property
    def num_aside(self) -> int:
        return len(self.queue) - len(self.eligible)

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
        num_aside = self.num_aside
        self._offer_more(inflight)
        self.refused = None
        for request in sorted(self._offers, key=self._order):
            if max_to_compute is not None and self._to_compute(request) > max_to_compute:
                if _is_firm(request):
                    return None
                continue
            running = self._claim(request, nothing_runs=nothing_runs)
            if running is not None:
                self._start(running)
                self._offers.remove(request)
                self._offered_in = inflight  # the others are still the first of those eligible
                return running
            self.refused = self.refused or request
            if _is_firm(request) or request.priority > self.queue[-1].priority:
                break  # smaller ones may not pass it
        if self.num_aside == num_aside and max_to_compute is None:
            self._refused_at = self.budget.available
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
        considered = [self._to_compute(r) for r in self.considered() if r.priority >= priority]
        return min(considered, default=None)

    def _to_compute(self, request: Request) -> int:
        """Of its tokens those that the tree did not seem to hold when it was last asked."""
        return request.num_tokens - self._hints.get(request, (0, 0))[1]

    def _order(self, request: Request) -> tuple[int, int, int]:
        if _is_firm(request):
            return -request.priority, 0, request.arrival
        return -request.priority, 1, self._to_compute(request)

    @property
    def top_priority(self) -> int | None:
        """The highest of those eligible; None if there is none."""
        return self.eligible[0].priority if self.eligible else None

    @property
    def _still_refused(self) -> bool:
        """No request could start, none arrived since, and no bytes were released."""
        return self._refused_at is not None and self.budget.available <= self._refused_at

    def _take_ready(self) -> None:
        """Those whose prefix is in the tree by now, or will not arrive, are eligible again."""
        for running in list(self._awaited):
            heap = running.waiters
            while heap and self._is_over(running, *heap[0]):
                *_, request = heapq.heappop(heap)
                if request.waits_for(running):
                    request.promise = None
                    bisect.insort(self.eligible, request, key=_rank)
                    self._refused_at = self._offered_in = None
            if not heap:
                del self._awaited[running]

    def _is_over(self, running: RunningSlot, shared: int, arrival: int, request: Request) -> bool:
        promise = request.promise
        if promise is None or promise.running is not running or shared <= running.in_tree:
            return True
        return running.stage is Stage.RELEASED or running.inflight_len < promise.inflight_len

    def _offer_more(self, inflight: InflightPrefixes) -> None:
        """As many as are considered now. Those that had better wait are set aside.

        In one plan a request is looked at once: later, what started since is all that can differ.
        """
        probed, waits, offers = 0, False, []
        if self._offered_in is inflight:
            key = inflight.last_key  # those that share it may wait for what started last
            for request in self._offers:
                if key and request.key == key and self._set_aside(request, inflight):
                    waits = True
                else:
                    offers.append(request)
        examined = len(self._offers) if self._offered_in is inflight else 0
        current = 0 if self.cache is None else self.cache.version
        most = examined + MAX_EXAMINED - len(offers)
        while examined < min(most, len(self.eligible)) and len(offers) < LOOKAHEAD:
            request = self.eligible[examined]
            examined += 1
            version, _ = self._hints.get(request, (-1, 0))
            if version != current and probed < PROBED_TOKENS:
                probed += request.num_tokens
                self._hints[request] = current, self._probe(request)
            if self._set_aside(request, inflight):
                waits = True
            else:
                offers.append(request)
        if waits:
            self.eligible[:examined] = offers
        self._offers, self._offered_in = offers, inflight

    def _set_aside(self, request: Request, inflight: InflightPrefixes) -> bool:
        """Whether it had better wait for a prefix that is being computed."""
        if not inflight or self.cache is None or request.wants_prompt_logprobs:
            return False
        promise = inflight.promise(
            request,
            self._hints.get(request, (0, 0))[1],
            knows_head=self.costs.spec.hidden_bytes > 0,
            deterministic=self.limits.deterministic,
        )
        if promise is None:
            return False
        request.promise = promise
        heapq.heappush(promise.running.waiters, (promise.shared, request.arrival, request))
        self._awaited[promise.running] = None
        return True

    def _claim(self, request: Request, *, nothing_runs: bool) -> RunningSlot | None:
        whole, least = request.max_total, request.num_tokens + 1
        ahead = GROWTH_TOKENS << min(request.num_preemptions, MAX_DOUBLINGS)
        wanted = whole if self.limits.deterministic else min(whole, request.num_tokens + ahead)
        running = self._try(request, wanted, use_match=True)
        if running is None and nothing_runs:
            running = self._try(request, least, use_match=True)
            running = running or self._try(request, least, use_match=False)
        return running

    def _try(self, request: Request, row_tokens: int, *, use_match: bool) -> RunningSlot | None:
        """Bytes for a row of so many tokens, the match locked and a slot; or nothing at all."""
        # Locking a match takes it out of what can be evicted, so this much at least is needed.
        borrows = use_match and self.costs.restores_by_reference
        if not borrows and self.costs.row_bytes(row_tokens) > self.budget.available:
            return None
        match = lock = None
        if self.cache is not None and use_match and not request.wants_prompt_logprobs:
            tokens = request.tokens(request.num_tokens)
            match = self.cache.match_prompt(tokens, request.salt)
            # Whole blocks alone are computed alike.
            if self.limits.deterministic and match.length % GRID:
                limit = match.length - match.length % GRID
                match = self.cache.match(tokens, request.salt, limit=limit)
            lock = self.cache.lock(match)
        length = 0 if match is None else match.length
        nbytes = self.costs.row_bytes(row_tokens, length)
        if not self.budget.claim(nbytes):
            if self.cache is not None and lock is not None:
                self.cache.unlock(lock)
            return None
        return RunningSlot(
            request,
            slot=self.slots.acquire(),
            prefill_len=request.num_tokens,
            nbytes=nbytes,
            row_tokens=row_tokens,
            lock=lock,
            start_len=length,
            capture_len=self._capture_len(request),
            keeps_reply=not self.limits.deterministic,
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
        if self.cache is None or request.wants_prompt_logprobs:
            return 0
        return self.cache.probe_prompt(request.tokens(request.num_tokens), request.salt)

    def _capture_len(self, request: Request) -> int:
        """How much of what it starts with its chunks will bring the tree."""
        if self.cache is None or request.wants_prompt_logprobs:
            return 0
        num_tokens = request.num_tokens
        return num_tokens - num_tokens % GRID if self.limits.deterministic else num_tokens


def _is_firm(request: Request) -> bool:
    """It may not be passed over any more."""
    return request.num_preemptions > 0 or request.passed_over >= MAX_PASSED_OVER


def _rank(request: Request) -> tuple[int, int]:
    return request.rank


def _place(ranked: list[Request], request: Request) -> int:
    return bisect.bisect_left(ranked, request.rank, key=_rank)


def _remove(ranked: list[Request], request: Request) -> None:
    place = _place(ranked, request)
    assert ranked[place] is request
    del ranked[place]
