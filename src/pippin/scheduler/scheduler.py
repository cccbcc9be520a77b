"""Decides what each step computes and takes in what it gave. Knows no arrays and no clock.

`plan(N+1)` is made before step N's tokens are known, assuming that running requests go on. If N
shows that one stopped, its row in N+1 is a ghost: the sampled token is dropped. The row itself is
not lost: it ran the reply's last token, so what the slot holds is exactly the finished sequence.
A slot's holding is released when the step that retires it has been committed, and that step is
planned after every step with a row of it has been committed (the fence).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pippin.backends.base import Admit, Costs, Retire, StepPlan, StepResult
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tiers.courier import Courier
from pippin.cache.tiers.tiers import Tiers
from pippin.decode.compiler import GrammarCompiler
from pippin.decode.grammar import Grammar
from pippin.errors import NotANumber, OutOfMemory, PippinError
from pippin.messages import Submit, TokenDelta
from pippin.metrics import EngineMetrics
from pippin.scheduler import retraction
from pippin.scheduler.admission import Admission, QueueLimits
from pippin.scheduler.budget import ByteBudget
from pippin.scheduler.captures import take_captures
from pippin.scheduler.chunks import Chunker
from pippin.scheduler.claims import Claims
from pippin.scheduler.constraints import Compiling, append_token, as_told, make_masks
from pippin.scheduler.holding import Holding
from pippin.scheduler.observer import Observer
from pippin.scheduler.outbox import Outbox
from pippin.scheduler.pace import SMALLEST_CHUNK, Pace
from pippin.scheduler.prompts import PromptPlanner
from pippin.scheduler.replies import ReplyPlanner
from pippin.scheduler.request import Request
from pippin.scheduler.slots import SlotPool
from pippin.scheduler.tier_traffic import TierTraffic
from pippin.scheduler.traffic import NoTraffic, Traffic
from pippin.types import FinishReason


@dataclass(frozen=True)
class Limits:
    """The part of the configuration that the scheduler needs."""

    max_running: int = 64
    max_queue: int = 1024
    max_queue_tokens: int = 1 << 40
    prefill_tokens: int = 512
    max_gap: float = math.inf  # seconds that a step with running streams may be planned to take
    for_streams: bool = True  # somebody reads replies as they come: prompts let them go on
    deterministic: bool = False  # only whole grid blocks of prompts are computed alike and shared
    forced_chunks: bool = True  # several tokens that a grammar forces may run at once
    capacity_bytes: int = 1 << 40


@dataclass
class _InFlight:
    """A launched plan and who had which slot then; slots may change hands before its commit."""

    plan: StepPlan
    owners: dict[int, Holding]
    retired: dict[int, Holding]
    transient_bytes: int  # claimed for its captures


@dataclass
class Scheduler:
    costs: Costs
    limits: Limits = field(default_factory=Limits)
    cache: PrefixCache | None = None
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    compiler: GrammarCompiler | None = None  # None: nobody asks for a grammar
    tiers: Tiers | None = None  # None: what memory has no room for is lost
    courier: Courier | None = None  # to the disk, where there are tiers

    def __post_init__(self) -> None:
        limits = self.limits
        self.spec = self.costs.spec
        self.slots = SlotPool(limits.max_running)
        self.budget = ByteBudget(limits.capacity_bytes, self.cache)
        self.admission = Admission(
            self.costs,
            self.budget,
            self.slots,
            self.cache,
            QueueLimits(limits.max_queue, limits.max_queue_tokens),
            deterministic=limits.deterministic,
        )
        self.requests: dict[str, Request] = {}  # every request that has not ended
        self.compiling = Compiling(self.compiler)
        self.holdings: dict[int, Holding] = {}  # by slot: in use, or not yet released
        self.traffic: Traffic = NoTraffic(self.cache)
        if self.tiers is not None and self.courier is not None:
            self.traffic = TierTraffic(self.tiers, self.courier, self.costs, self.budget)
        self.last_ghosts = 0
        self.observer: Observer | None = None  # None: nobody watches
        self._leaving: list[Holding] = []  # their requests have ended or are being retracted
        self._in_flight: dict[int, _InFlight] = {}
        self._next_step = 0
        self._committed = -1
        self._arrivals = itertools.count()
        self._outbox = Outbox()
        self._seeds = random.Random()
        policy = None if self.cache is None else self.cache.policy
        self._claims = Claims(self.costs, self.budget, self.cache)
        self._prompts = PromptPlanner(
            Pace(limits.prefill_tokens, limits.max_gap, limits.for_streams),
            self.admission,
            self.slots,
            self._claims,
            Chunker(
                self.spec,
                policy,
                smallest=min(SMALLEST_CHUNK, limits.prefill_tokens),
                on_grid=limits.deterministic,
            ),
            self.cache,
        )
        # What a decode step computed differs in its last bits from what a prompt's chunk would.
        self._replies = ReplyPlanner(
            self._claims,
            None if limits.deterministic else policy,
            self.spec.state_bytes > 0,
            runs_chunks=limits.forced_chunks and not limits.deterministic,
        )

    # ---- what the outside asks for -------------------------------------------------------

    def add(
        self, submit: Submit, grammar: Grammar | None = None, now_s: float | None = None
    ) -> None:
        """Queue a request, or answer it at once with an error delta.

        One that asks for a grammar gets into the queue when that is compiled, unless it is given.
        """
        # An error delta would carry the same id and end the first request for its client.
        assert submit.id not in self.requests, f"request id {submit.id} is in use"
        try:
            self.check(submit)
        except PippinError as error:
            self._outbox.error(submit.id, error)
            self.metrics.requests_failed += 1
            return
        seed = submit.params.seed
        request = Request.from_submit(
            submit,
            seed=self._seeds.getrandbits(63) if seed is None else seed,
            arrival=next(self._arrivals),
            came_at=self._prompts.num_planned,
            grammar=grammar,
        )
        request.submitted_s = now_s
        self.requests[request.id] = request
        self.metrics.prompt_tokens += request.prompt_len
        spec = submit.params.grammar
        if spec is None or grammar is not None:
            self.admission.add(request)
        else:
            self.compiling.add(request, spec)
        self._tell_changed(request)

    def check(self, submit: Submit) -> None:
        """Raise for a request that could never start, or that finds the queue full."""
        self.admission.check(submit, num_coming=self.num_waiting - len(self.admission.queue))

    @property
    def num_waiting(self) -> int:
        """In the queue, or on their way into it."""
        return len(self.admission.queue) + len(self.compiling) + self.traffic.num_loading

    def abort(self, request_id: str) -> None:
        self._end_early(request_id, "abort")

    def finish(self, request_id: str) -> None:
        """The server saw a stop string: what has been generated so far is the reply."""
        self._end_early(request_id, "stop")

    @property
    def pace(self) -> Pace:
        return self._prompts.pace

    @pace.setter
    def pace(self, pace: Pace) -> None:
        self._prompts.pace = pace

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self.holdings or self._outbox) or self.traffic.busy

    @property
    def num_running(self) -> int:
        return sum(1 for holding in self.holdings.values() if holding.runs)

    # ---- plan ------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do before something is committed."""
        step = self._next_step
        for request in self.compiling.take_done(self._fail):
            self.admission.add(request)
            self._tell_changed(request)
        for request in self.traffic.divert(self.admission, self.pace.compute_seconds):
            self._tell_changed(request)
        retire, retired = self._plan_retires(step)
        replies = self._replies.plan(step, self.holdings.values(), self.pace.pays_off)
        admit, prefill = self._prompts.plan(step, self.holdings, replies.num_streams)
        self._count_cached(admit)
        if replies.starved:
            self._make_room(replies.starved)
        rows = (*replies.chunks, *prefill), tuple(replies.decode)
        plan = StepPlan(step, retire, admit, *rows, *self.traffic.plan(step))
        if plan.empty:
            if not (self._in_flight or self.holdings or self.traffic.loads_under_way):
                self._fail_hopeless()
            return None
        self._next_step += 1
        self._in_flight[step] = _InFlight(
            plan, dict(self.holdings), retired, self._claims.take_transient()
        )
        return plan

    def plan_spill(self) -> StepPlan | None:
        """A step that only writes behind, for an engine that is about to stop."""
        step = self._next_step
        spill, load = self.traffic.plan(step)
        if not spill and not load:
            return None
        self._next_step += 1
        plan = StepPlan(step, spill=spill, load=load)
        self._in_flight[step] = _InFlight(plan, dict(self.holdings), {}, 0)
        return plan

    def masks(self, plan: StepPlan) -> np.ndarray:
        """What the plan's grammar rows may sample, once every earlier step is committed.

        int32 [masked rows, words], packed. A grammar that raises ends its own request, and the row
        becomes a ghost.
        """
        owners = self._in_flight[plan.step].owners
        return make_masks(plan, owners, self.spec.vocab_size, self._fail)

    def _plan_retires(self, step: int) -> tuple[tuple[Retire, ...], dict[int, Holding]]:
        retire: list[Retire] = []
        retired: dict[int, Holding] = {}
        for holding in list(self._leaving):
            fenced = holding.last_step > self._committed
            if fenced or self._replies.runs_last_token(holding):
                continue
            self._leaving.remove(holding)
            retire.append(self._replies.retire(step, holding))
            retired[holding.slot] = holding
            if holding.runs:
                self._requeue(holding.request)
        return tuple(retire), retired

    def _count_cached(self, admit: Sequence[Admit]) -> None:
        for request in (self.holdings[started.slot].request for started in admit):
            if not request.num_retractions:
                self.metrics.cached_tokens += request.cached_len
                self.metrics.disk_tokens += request.disk_len

    def _requeue(self, request: Request) -> None:
        request.retract()
        self.admission.add(request)
        self.metrics.retractions += 1
        self._tell_changed(request)

    # ---- when bytes are short --------------------------------------------------------------

    def _make_room(self, starved: Sequence[Holding]) -> None:
        """Running replies have outgrown the budget: give up checkpoints, then retract somebody.

        Whoever starves goes on in a later plan. Where nothing can be given up and nothing is on
        its way back, one request is larger than all there is.
        """
        shortage = self._claims.shortage(starved, self.holdings.values())
        if shortage > 0 and self.traffic.give_up_loads():
            shortage = self._claims.shortage(starved, self.holdings.values())
        if shortage <= 0:
            return
        running = [holding for holding in self.holdings.values() if holding.runs]
        for holding in retraction.choose(running, shortage):
            holding.retracting = True
            self._leaving.append(holding)
        if len(self.holdings) == 1 and not self._in_flight:
            self._start_over(starved[0])

    def _start_over(self, holding: Holding) -> None:
        """Alone, and out of bytes. What it borrowed from the tree comes with a state and more that
        a row of its own does without: then it begins again; or else it is too large."""
        fits = self.costs.row_bytes(holding.held + 1) <= self.budget.capacity
        if holding.lock is None or not fits:
            self._fail_too_large(holding)
        elif not holding.retracting:
            holding.retracting = True
            self._leaving.append(holding)

    def _fail_too_large(self, holding: Holding) -> None:
        need, capacity = self._claims.row_bytes(holding, holding.held + 1), self.budget.capacity
        message = (
            f"the reply reached {holding.held:,} tokens and needs {need:,} bytes, "
            f"the budget holds {capacity:,}"
        )
        self._fail(holding.request, OutOfMemory(message))

    def _fail_hopeless(self) -> None:
        """Nothing runs, and yet somebody cannot start: it had outgrown the whole budget."""
        request = self.admission.refused
        if request is not None:
            need = self.costs.row_bytes(request.num_tokens + 1)
            message = (
                f"the request grew to {request.num_tokens:,} tokens and needs {need:,} bytes, "
                f"the budget holds {self.budget.capacity:,}"
            )
            self._fail(request, OutOfMemory(message))

    # ---- commit ----------------------------------------------------------------------------

    def commit(self, step: int, result: StepResult) -> list[TokenDelta]:
        """Take in a finished step: tokens, finishes, captures. Returns what clients are owed."""
        flight = self._settle(step)
        self.traffic.commit(step, result)
        for slot in result.overflowed:
            self._taint(flight.owners[slot], NotANumber("the model's values overflowed"))
        if self.cache is not None:
            whole = take_captures(
                result.captures, flight.owners, flight.retired, self.cache, self.budget
            )
            for request, length in whole:
                self.traffic.note(request, length)
        for holding in flight.retired.values():
            self._release(holding)
        self._unlock_prompts(flight)
        self._take_tokens(flight, result)
        return self.take_outbox()

    def fail_step(self, step: int, error: Exception) -> list[TokenDelta]:
        """The backend could not run a plan: its requests fail, the others go on.

        How far it came is unknown. What its rows hold is tainted, and so is whatever later steps
        compute on them; slots that it meant to free are freed once more.
        """
        flight = self._settle(step)
        self.traffic.fail_step(step)
        for row in flight.plan.rows:
            self._taint(flight.owners[row.slot], error)
        for holding in flight.retired.values():
            holding.tainted = True
            self._leaving.append(holding)
        return self.take_outbox()

    def fail_all(self, error: Exception) -> list[TokenDelta]:
        """The engine is about to stop: everybody is told."""
        for request in list(self.requests.values()):
            self._fail(request, error)
        return self.take_outbox()

    def take_outbox(self) -> list[TokenDelta]:
        return self._outbox.take()

    def _settle(self, step: int) -> _InFlight:
        flight = self._in_flight.pop(step)
        assert step == self._committed + 1, "steps are committed in order"
        self._committed = step
        self.budget.release(flight.transient_bytes)
        return flight

    def _unlock_prompts(self, flight: _InFlight) -> None:
        """A row whose prompt is computed depends on the tree only if it reads the tree's own."""
        for row in flight.plan.prefill:
            holding = flight.owners[row.slot]
            if row.samples and not holding.released:
                holding.unlock_tip(self.cache)
                if not self.costs.restores_by_reference:
                    holding.unlock(self.cache)

    def _take_tokens(self, flight: _InFlight, result: StepResult) -> None:
        ghosts = 0
        for row in flight.plan.sampled_rows:
            request = flight.owners[row.slot].request
            if request.finish is not None:
                ghosts += 1
            elif row.end == request.num_tokens:  # else a grammar forced it: it was known before
                self._take_token(request, row.slot, result)
        self.last_ghosts = ghosts

    def _take_token(self, request: Request, slot: int, result: StepResult) -> None:
        if request.embeds:
            self._outbox.embedding(request, result.hidden[slot])
            self._end(request, "stop")
            self.metrics.requests_finished += 1
            return
        try:
            tokens, reason = append_token(request, result.tokens[slot])
        except Exception as error:  # whatever a grammar's library raises
            self._fail(request, as_told(error))
            return
        self._outbox.tokens(request, slot, tokens, result, reason)
        self.metrics.generated_tokens += len(tokens)
        self.metrics.forced_tokens += len(tokens) - 1
        if reason is not None:
            self._end(request, reason)
            self.metrics.requests_finished += 1

    # ---- ends ------------------------------------------------------------------------------

    def _end_early(self, request_id: str, reason: FinishReason) -> None:
        request = self.requests.get(request_id)
        if request is None:
            return  # it ended by itself while the message was on its way
        self._outbox.end(request, reason)
        self._end(request, reason)
        if reason == "abort":
            self.metrics.requests_aborted += 1
        else:
            self.metrics.requests_finished += 1

    def _taint(self, holding: Holding, error: Exception) -> None:
        """Nothing that its row holds, or will hold, is to be used: its request fails."""
        holding.tainted = True
        if holding.runs:
            self._fail(holding.request, error)

    def _fail(self, request: Request, error: Exception) -> None:
        self._outbox.error(request.id, error)
        self._end(request, "error")
        self.metrics.requests_failed += 1

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.phase == "compiling":
            self.compiling.remove(request)
        elif request.phase == "loading":
            self.traffic.remove(request)
        elif request.phase == "waiting":
            self.admission.remove(request)
        elif not (holding := self.holdings[request.slot]).retracting:
            self._leaving.append(holding)
        request.end(reason)
        del self.requests[request.id]
        self._tell_changed(request)

    def _tell_changed(self, request: Request) -> None:
        if self.observer is not None:
            self.observer.request_changed(request)

    def _release(self, holding: Holding) -> None:
        holding.release(self.budget, self.slots, self.cache)
        del self.holdings[holding.slot]
