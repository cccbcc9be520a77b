"""Decides what each step computes and takes in what it gave. Knows no arrays and no clock.

`plan(N+1)` is made before step N's tokens are known, assuming that running requests go on. If N
shows that one stopped, its row in N+1 is a ghost: the sampled token is dropped. The row itself is
not lost: it ran the reply's last token, so what the slot holds is exactly the finished sequence.
A slot is given back only in a plan made after every step with a row of it has been committed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pippin.backends.base import Admit, DecodeRow, PrefillRow, Restore, Retire, StepPlan, StepResult
from pippin.cache.prefix_cache import Match, PrefixCache
from pippin.decode.grammar import Grammar
from pippin.errors import OutOfMemory, PippinError
from pippin.messages import Submit, TokenDelta
from pippin.metrics import EngineMetrics
from pippin.scheduler.admission import Admission
from pippin.scheduler.budget import ByteBudget
from pippin.scheduler.chunks import Chunker
from pippin.scheduler.harvest import release_states, take_captures
from pippin.scheduler.outbox import Outbox
from pippin.scheduler.pace import SMALLEST_CHUNK, Pace
from pippin.scheduler.request import Request
from pippin.scheduler.slots import SlotPool
from pippin.types import GRID, FinishReason, ModelSpec


@dataclass(frozen=True)
class Limits:
    """The part of the configuration that the scheduler needs."""

    max_running: int = 64
    max_queue: int = 1024
    prefill_tokens: int = 512
    deterministic: bool = False  # only whole grid blocks of prompts are computed alike and shared
    capacity_bytes: int = 1 << 40


@dataclass
class _InFlight:
    """A launched plan and who owned which slot then; slots may change hands before its commit."""

    plan: StepPlan
    owners: dict[int, Request]
    retired: dict[int, Request]


@dataclass
class Scheduler:
    spec: ModelSpec
    limits: Limits = field(default_factory=Limits)
    cache: PrefixCache | None = None
    metrics: EngineMetrics = field(default_factory=EngineMetrics)

    def __post_init__(self) -> None:
        self.slots = SlotPool(self.limits.max_running)
        self.budget = ByteBudget(self.spec, self.limits.capacity_bytes, self.cache)
        self.admission = Admission(
            self.budget,
            self.cache,
            max_queue=self.limits.max_queue,
            on_grid=self.limits.deterministic,
        )
        self.pace = Pace(self.limits.prefill_tokens)
        self.requests: dict[str, Request] = {}  # every request not yet RETIRED
        self.active: dict[int, Request] = {}  # by slot
        self._in_flight: dict[int, _InFlight] = {}
        self._next_step = 0
        self._arrivals = itertools.count()
        self._committed = -1
        self._outbox = Outbox()
        self._seeds = random.Random()
        self.last_ghosts = 0
        self._policy = None if self.cache is None else self.cache.policy
        self._chunker = Chunker(
            self.spec,
            self._policy,
            smallest=min(SMALLEST_CHUNK, self.limits.prefill_tokens),
            on_grid=self.limits.deterministic,
        )
        # What a decode step computed differs in its last bits from what a prompt's chunk would.
        self._caches_replies = self.cache is not None and not self.limits.deterministic
        self._captures_replies = self._caches_replies and self.spec.state_bytes > 0
        self._ending: dict[int, Request] = {}  # by slot: DONE, not yet retired
        self._parked: list[Request] = []  # of the last plan: no bytes to grow into
        self._lost_retires: tuple[Retire, ...] = ()  # of a launch that failed

    # ---- what the outside asks for -------------------------------------------------------

    def add(self, submit: Submit, grammar: Grammar | None = None) -> None:
        """Queue a request, or answer it at once with an error delta."""
        # An error delta would carry the same id and end the first request for its client.
        assert submit.id not in self.requests, f"request id {submit.id} is in use"
        try:
            self.admission.check(submit)
        except PippinError as error:
            self._outbox.error(submit.id, error)
            self.metrics.requests_failed += 1
            return
        params = submit.params
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        request = Request.from_submit(submit, seed=seed, arrived=next(self._arrivals))
        request.grammar = grammar
        self.requests[request.id] = request
        self.admission.add(request)
        self.metrics.prompt_tokens += request.prompt_len

    def abort(self, request_id: str) -> None:
        self._end_early(request_id, "abort")

    def finish(self, request_id: str) -> None:
        """The server saw a stop string: what has been generated so far is the reply."""
        self._end_early(request_id, "stop")

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self._outbox)

    @property
    def num_running(self) -> int:
        return sum(1 for request in self.active.values() if request.running)

    # ---- plan ------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do before something is committed."""
        step = self._next_step
        retire, retired = self._plan_retires()
        decode = self._plan_decodes(step)
        admit, prefill = self._plan_prefills(step, len(decode), tuple(retired.values()))
        plan = StepPlan(step, retire, admit, prefill, decode)
        if plan.empty:
            if self._parked and not self._in_flight:
                self._relieve_parked()
            return None
        self._next_step += 1
        self._in_flight[step] = _InFlight(plan, dict(self.active), retired)
        return plan

    def masks(self, plan: StepPlan) -> dict[int, np.ndarray]:
        """What the plan's grammar rows may sample, once every earlier step is committed."""
        everything = np.ones(self.spec.vocab_size, dtype=bool)
        owners = self._in_flight[plan.step].owners
        masks = {}
        for slot in plan.masked_slots:
            request = owners[slot]
            grammar = request.grammar if request.running else None  # None: a ghost
            masks[slot] = everything if grammar is None else grammar.allowed()
        return masks

    def _plan_retires(self) -> tuple[tuple[Retire, ...], dict[int, Request]]:
        retire, self._lost_retires = list(self._lost_retires), ()
        retired: dict[int, Request] = {}
        for slot, request in list(self._ending.items()):
            fenced = request.last_step > self._committed
            if fenced or self._must_absorb(request):
                continue
            captures = self._caches_replies and request.will_be_cached
            retire.append(Retire(slot, request.in_tree, request.held, captures))
            retired[slot] = request
            self._give_back(request)
        return tuple(retire), retired

    def _plan_decodes(self, step: int) -> tuple[DecodeRow, ...]:
        self._parked = []
        rows: list[DecodeRow] = []
        for slot, request in self.active.items():
            samples = request.phase == "decode" and request.num_sampled < request.params.max_tokens
            if not samples and not self._must_absorb(request):
                continue
            position = request.held
            if position >= request.reserved_tokens and not self.budget.grow(request, position + 1):
                if samples:
                    self._parked.append(request)
                else:
                    request.absorbs = False  # the tree gets the reply without its last token
                continue
            request.held = end = position + 1
            request.num_sampled += samples
            request.last_step = step
            checkpoint = end % GRID == 0 and self._captures_decode(end)
            rows.append(DecodeRow(slot, position, samples, checkpoint, request.grammar is not None))
        return tuple(rows)

    def _plan_prefills(
        self, step: int, num_streams: int, retired: Sequence[Request]
    ) -> tuple[tuple[Admit, ...], tuple[PrefillRow, ...]]:
        admit: list[Admit] = []
        rows: list[PrefillRow] = []
        started = [r for r in self.active.values() if r.phase == "prefill"]
        left = self.pace.budget(num_streams, len(started) + len(self.admission.queue))
        for request in sorted(started, key=lambda r: r.arrived):
            if not self._chunker.is_worth(request, left):
                break
            rows.append(self._chunker.next_chunk(step, request, left, restore=None))
            left -= len(rows[-1].tokens)
        # Bytes that are given back go to those that are parked before anybody new.
        while self._may_start(left):
            coming = [*self.active.values(), *self._retired_in_flight(), *retired]
            picked = self.admission.pick(coming, alone=not self.active)
            if picked is None:
                break
            request, match = picked
            restore = self._start(request, match)
            admit.append(_admit(request))
            rows.append(self._chunker.next_chunk(step, request, left, restore))
            left -= len(rows[-1].tokens)
        return tuple(admit), tuple(rows)

    def _may_start(self, left: int) -> bool:
        """Whether somebody waits, and finds a slot and more than a crumb of this step."""
        room = left >= self._chunker.smallest and self.slots.num_free > 0
        return room and bool(self.admission.queue) and not self._parked

    def _retired_in_flight(self) -> list[Request]:
        """Those whose replies are on their way into the tree."""
        return [r for flight in self._in_flight.values() for r in flight.retired.values()]

    def _start(self, request: Request, match: Match | None) -> Restore | None:
        request.slot = self.slots.take()
        request.phase = "prefill"
        self.active[request.slot] = request
        if match is None:
            return None
        request.cached_len = request.held = request.in_tree = match.length
        request.branch = match.branch
        self.metrics.cached_tokens += match.length
        if match.length == 0:
            return None
        assert self.cache is not None
        assert request.lock is not None
        return Restore(match.length, self.cache.payloads(request.lock))

    def _captures_decode(self, position: int) -> bool:
        if self._policy is None or not self._captures_replies:
            return False
        return self._policy.captures_decode(position)

    def _must_absorb(self, request: Request) -> bool:
        """Whether a reply's last token is still to be run, so that the tree gets all of it.

        Once every sample is planned, the next step can do so before that token is known.
        """
        if not self._caches_replies or not request.absorbs or request.held < request.prompt_len:
            return False
        if request.phase == "decode":
            return request.held < request.max_total
        return request.will_be_cached and request.held < request.num_tokens

    def _relieve_parked(self) -> None:
        """Nobody can go on. Their prefixes in the tree may go, for rows hold their own copies.

        If that was not enough, the youngest gives its bytes to the others.
        """
        if any(request.lock is not None for request in self._parked):
            for request in self._parked:
                self._unlock(request)
            return
        request = max(self._parked, key=lambda r: r.arrived)
        need, capacity = self.budget.row_bytes(request.held + 1), self.budget.capacity
        others = self.budget.reserved - request.reserved_bytes
        self._fail(
            request,
            OutOfMemory(
                f"the reply reached {request.held:,} tokens and needs {need:,} bytes; "
                f"other requests hold {others:,} of {capacity:,}"
            ),
        )

    # ---- commit ----------------------------------------------------------------------------

    def commit(self, step: int, result: StepResult) -> list[TokenDelta]:
        """Take in a finished step: tokens, finishes, captures. Returns what clients are owed."""
        flight = self._in_flight.pop(step)
        assert step == self._committed + 1, "steps are committed in order"
        self._committed = step
        if self.cache is not None:
            take_captures(self.cache, result.captures, flight.owners, flight.retired)
        self._take_tokens(flight, result)
        return self.take_outbox()

    def fail_step(self, step: int, error: Exception) -> list[TokenDelta]:
        """The backend could not run a plan: its requests fail, the others go on.

        How far it came is unknown, so slots that the plan meant to free are freed once more.
        """
        flight = self._in_flight.pop(step)
        assert step == self._committed + 1, "steps are committed in order"
        self._committed = step
        for row in flight.plan.rows:
            request = flight.owners[row.slot]
            request.spoiled = True
            if request.running:
                self._fail(request, error)
        for request in flight.retired.values():
            release_states(request)
        lost = (r.slot for r in flight.plan.retire if r.slot not in self.active)
        self._lost_retires += tuple(Retire(slot) for slot in lost)
        return self.take_outbox()

    def take_outbox(self) -> list[TokenDelta]:
        return self._outbox.take()

    def _take_tokens(self, flight: _InFlight, result: StepResult) -> None:
        slots, owners, tokens = flight.plan.sampled_slots, flight.owners, result.tokens
        ghosts = 0
        for slot in slots:
            request = owners[slot]
            if request.phase == "done":
                ghosts += 1
                continue
            token = tokens[slot]
            reason = request.append(token)
            self._outbox.token(request, token, result, reason)
            if reason is not None:
                self._done(request, reason)
                self.metrics.requests_finished += 1
        self.last_ghosts = ghosts
        self.metrics.generated_tokens += len(slots) - ghosts

    # ---- ends ------------------------------------------------------------------------------

    def _end_early(self, request_id: str, reason: FinishReason) -> None:
        request = self.requests.get(request_id)
        if request is None or request.finish is not None:
            return  # it ended by itself while the message was on its way
        self._outbox.end(request, reason)
        request.spoiled = request.held > request.num_tokens  # ended amid a step: two are ahead
        self._done(request, reason)
        if reason == "abort":
            self.metrics.requests_aborted += 1
        else:
            self.metrics.requests_finished += 1

    def _fail(self, request: Request, error: Exception) -> None:
        self._outbox.error(request.id, error)
        self._done(request, "error")
        self.metrics.requests_failed += 1

    def _done(self, request: Request, reason: FinishReason) -> None:
        request.finish = reason
        if request.phase == "waiting":
            self.admission.remove(request)
            request.phase = "retired"
            del self.requests[request.id]
        else:
            request.phase = "done"
            self._ending[request.slot] = request

    def _give_back(self, request: Request) -> None:
        if not request.will_be_cached:
            release_states(request)
        self._unlock(request)
        self.budget.release(request)
        self.slots.give_back(request.slot)
        del self.active[request.slot], self._ending[request.slot]
        del self.requests[request.id]
        request.phase = "retired"

    def _unlock(self, request: Request) -> None:
        if self.cache is not None and request.lock is not None:
            self.cache.unlock(request.lock)
            request.lock = None


def _admit(request: Request) -> Admit:
    stop_ids = tuple(sorted(request.stop_ids))
    return Admit(request.slot, request.params, stop_ids, request.prompt, request.seed)
