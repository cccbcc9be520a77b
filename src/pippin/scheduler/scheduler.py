"""Plans what each step computes and commits its result.

`plan(N+1)` is made before step N's tokens are known, assuming that running requests go on. If N
shows that one stopped, its row in N+1 is a ghost: the sampled token is dropped. The row itself is
not lost: it ran the reply's last token, so what the slot holds is exactly the finished sequence.
A `RunningSlot` is released when the step that retires it has been committed, and that step is
planned after every step with a row of it has been committed (the fence).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pippin.backends.base import (
    Admit,
    Costs,
    Damage,
    PrefillRow,
    Retire,
    StepPlan,
    StepResult,
)
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tiers.cache_tier import CacheTier
from pippin.cache.tiers.tier_io import TierIO
from pippin.decode.compile import Grammar, GrammarCompiler
from pippin.errors import PippinError
from pippin.messages import Submit, TokenDelta
from pippin.metrics import EngineMetrics
from pippin.scheduler.admission import Admission
from pippin.scheduler.memory import Claims
from pippin.scheduler.pace import CostModel, Pace, Timed
from pippin.scheduler.prompts import PromptPlanner
from pippin.scheduler.registry import Registry
from pippin.scheduler.replies import Compiling, Following, ReplyPlanner, make_masks
from pippin.scheduler.request import (
    ByteBudget,
    Limits,
    Quality,
    Request,
    RunningSlot,
    SlotPool,
    Stage,
)
from pippin.scheduler.speculation import Speculation
from pippin.scheduler.spills import Pushes
from pippin.scheduler.traffic import Traffic


@dataclass(frozen=True)
class InflightStep:
    """A plan and who had which slot then; slots may change hands before its commit."""

    plan: StepPlan
    owners: dict[int, RunningSlot]
    retired: dict[int, RunningSlot]
    transient_bytes: int  # claimed for its captures


@dataclass
class Scheduler:
    costs: Costs
    limits: Limits = field(default_factory=Limits)
    cache: PrefixCache | None = None
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    compiler: GrammarCompiler | None = None  # None: requests have no grammars
    tiers: Sequence[tuple[CacheTier, TierIO]] = ()  # below memory, the fastest first
    speculation: Speculation | None = None  # None: one token a step
    pushes: Pushes | None = None  # None: no decode engine asks for prompts

    def __post_init__(self) -> None:
        limits = self.limits
        self.spec = self.costs.spec
        self.slots = SlotPool(limits.max_running)
        self.budget = ByteBudget(limits.capacity_bytes, self.cache)
        self.admission = Admission(self.costs, self.budget, self.slots, self.cache, limits)
        self.compiling = Compiling(self.compiler)
        self.traffic = Traffic(self.tiers, self.costs, self.budget, self.cache, self.pushes)
        self.following = Following(self.spec.vocab_size)
        self._claims = Claims(self.costs, self.budget, self.cache)
        self.registry = Registry(
            self.metrics,
            self.compiling,
            self.following,
            self.admission,
            self.traffic,
            self._claims,
        )
        if self.speculation is not None:
            self.registry.on_end = self.speculation.forget
            self.metrics.drafters.update(self.speculation.no_counts)
        self.requests = self.registry.requests
        self.running_slots = self.registry.running_slots
        self.inflight_steps: dict[int, InflightStep] = {}  # in order
        self.next_step = 0
        self.committed = -1  # or failed: the last step that was
        costs = CostModel()
        if self.speculation is not None and self.speculation.policy is not None:
            costs = self.speculation.policy.costs
        self.pace = Pace(limits.prefill_tokens, limits.max_gap, limits.for_streams, costs)
        self._arrivals = itertools.count()
        self._seeds = random.Random()
        policy = None if self.cache is None else self.cache.policy
        self._prompts = PromptPlanner(
            self.admission,
            self.slots,
            self._claims,
            self.running_slots,
            limits,
            self.speculation,
        )
        # What a decode step computed differs in its last bits from what a prompt's chunk would.
        self._replies = ReplyPlanner(
            self._claims,
            None if limits.deterministic else policy,
            self.spec.state_bytes > 0,
            runs_chunks=limits.forced_chunks and not limits.deterministic,
            speculation=self.speculation,
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
            self.registry.refuse(submit.id, error)
            if self.pushes is not None and submit.handover:
                self.pushes.refuse(submit.handover, str(error))
            return
        seed = submit.params.seed
        request = Request(
            submit,
            seed=self._seeds.getrandbits(63) if seed is None else seed,
            arrival=next(self._arrivals),
            arrived_at=self._prompts.num_planned,
            grammar=grammar,
        )
        request.submitted_s = now_s
        if self.pushes is not None and submit.handover:
            self.pushes.start(request)
        self.registry.add(request, submit.params.grammar if grammar is None else None)

    def check(self, submit: Submit) -> None:
        """Raise for a request that could never start, or that finds the queue full."""
        self.admission.check(
            submit,
            num_coming=self.num_waiting - len(self.admission.queue),
            num_coming_tokens=self.registry.num_coming_tokens,
        )

    @property
    def num_waiting(self) -> int:
        coming = len(self.compiling) + self.following.num_coming + self.traffic.num_loading
        return len(self.admission.queue) + coming

    @property
    def has_work(self) -> bool:
        if self.requests or self.running_slots or self.registry.outbox:
            return True
        return self.traffic.busy

    @property
    def num_running(self) -> int:
        return len(self.registry.running)

    # ---- plan ------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do before something is committed."""
        if self.pushes is not None and self.pushes.waits and not self.inflight_steps:
            sent = self.plan_spill()  # before the next chunk is computed, not behind it
            if sent is not None:
                return sent
        step = self.next_step
        if self.compiling.pending:
            self.registry.take_compiled()
        if self.following._pending:
            self.registry.take_followed()
        if self.traffic.tiers:
            for request in self.traffic.start_loads(self.admission, self.pace.compute_seconds):
                self.registry.notify(request)
        retire, retired = self._plan_retires(step) if self.registry.leaving else ((), {})
        prompts = [
            running
            for running in self.running_slots.values()
            if running.request.phase == "prefill" and running.stage is Stage.RUNNING
        ]
        queued = bool(self.admission.queue)
        may_start = queued and self._prompts.may_start()  # those that are ready are eligible now
        replies = self._replies.plan(
            step,
            self.running_slots.values(),
            self.pace.pays_off,
            beside_prompts=may_start or bool(prompts),
        )
        admit: tuple[Admit, ...] = ()
        prefill: tuple[PrefillRow, ...] = tuple(replies.chunks)
        if prompts or queued:
            admit, chunks = self._prompts.plan(step, prompts, replies, self.pace)
            prefill += chunks
            self.registry.count_started(admit)
        if replies.starved:
            self.registry.make_room(replies.starved, in_flight=bool(self.inflight_steps))
        moves = self.traffic.plan(step) if self.traffic.moves else ((), ())
        plan = StepPlan(step, retire, admit, prefill, tuple(replies.decode), *moves)
        if plan.empty:
            waits = self.inflight_steps or self.running_slots or self.traffic.loads_under_way
            if not waits and (hopeless := self.admission.refused) is not None:
                need = self.costs.row_bytes(hopeless.num_tokens + 1)
                self.registry.fail_large(hopeless, hopeless.num_tokens, need)
            return None
        self._add(plan, retired, self._claims.take_transient())
        return plan

    def plan_spill(self) -> StepPlan | None:
        """A step that moves payloads between tiers, and computes nothing."""
        spill, load = self.traffic.plan(self.next_step)
        if not spill and not load:
            return None
        plan = StepPlan(self.next_step, spill=spill, load=load)
        self._add(plan, {}, 0)
        return plan

    def _add(self, plan: StepPlan, retired: dict[int, RunningSlot], transient_bytes: int) -> None:
        owners = dict(self.running_slots)
        self.inflight_steps[self.next_step] = InflightStep(plan, owners, retired, transient_bytes)
        self.next_step += 1

    def masks(self, plan: StepPlan) -> np.ndarray:
        """What the plan's grammar rows may sample, once every earlier step is committed.

        int32 [masked rows, words], packed. A grammar that raises ends its own request, and the row
        becomes a ghost.
        """
        owners = self.inflight_steps[plan.step].owners
        return make_masks(plan, owners, self.spec.vocab_size, self.registry.fail)

    def _plan_retires(self, step: int) -> tuple[tuple[Retire, ...], dict[int, RunningSlot]]:
        retire: list[Retire] = []
        retired: dict[int, RunningSlot] = {}
        for running in list(self.registry.leaving):
            if running.last_step > self.committed or self._replies.runs_last_token(running):
                continue
            self.registry.leaving.remove(running)
            retire.append(self._replies.retire(step, running))
            retired[running.slot] = running
            if running.runs:
                self.registry.requeue(running)
        return tuple(retire), retired

    # ---- commit ----------------------------------------------------------------------------

    def commit(self, step: int, result: StepResult) -> int:
        """A step has run: tokens, finishes, captures. Returns how many of its rows were ghosts."""
        inflight = self._end_step(step)
        if self.speculation is not None:
            self.speculation.settle(inflight.plan, inflight.owners, result, self.metrics)
        if self.traffic.moves:
            self.traffic.commit(step, result)
        for damage in result.damaged:
            if (owner := inflight.owners.get(damage.slot)) is not None:
                self._run_again(owner, damage)
        for slot in result.overflowed:
            if (owner := inflight.owners[slot]).quality is not Quality.DAMAGED:
                overflow = PippinError("the model's values overflowed", code="not_a_number")
                self.registry.taint(owner, overflow)
        if result.captures and self.cache is not None:
            owners, retired = inflight.owners, inflight.retired
            note = self.traffic.note
            self._claims.take_captures(result.captures, owners, retired, self.cache, note)
        for running in inflight.retired.values():
            running.release(self.budget, self.slots, self.cache)
            del self.running_slots[running.slot]
        for row in inflight.plan.prefill:
            running = inflight.owners[row.slot]
            if row.samples and running.stage is not Stage.RELEASED:
                running.unlock_tip(self.cache)
                # What its prompt was restored from matters no more, unless the row reads just that.
                if not self.costs.restores_by_reference:
                    running.unlock(self.cache)
        return self._take_tokens(inflight, result)

    def fail_step(self, step: int, error: Exception) -> None:
        """The backend could not run a plan: its requests fail, the others go on.

        How far it came is unknown. What its rows hold is tainted, and so is whatever later steps
        compute on them; slots that it meant to free are freed once more.
        """
        inflight = self._end_step(step)
        self.traffic.fail_step(step)
        for row in inflight.plan.rows:
            self.registry.taint(inflight.owners[row.slot], error)
        for running in inflight.retired.values():
            running.worsen(Quality.TAINTED)
            self.registry.leaving.append(running)

    def fail_all(self, error: Exception) -> None:
        """The engine is about to stop: every request ends with an error."""
        for request in list(self.requests.values()):
            self.registry.fail(request, error)

    def take_outbox(self) -> list[TokenDelta]:
        return self.registry.outbox.take()

    def observe(self, timed: Timed) -> None:
        self.pace.observe(timed)
        if self.speculation is not None and self.speculation.policy is not None:
            self.speculation.policy.observe(timed)

    def _end_step(self, step: int) -> InflightStep:
        assert step == self.committed + 1, "steps end in order"
        self.committed = step
        inflight = self.inflight_steps.pop(step)
        if inflight.transient_bytes:
            self.budget.release(inflight.transient_bytes)
        return inflight

    def _run_again(self, running: RunningSlot, damage: Damage) -> None:
        """What the row was restored from has changed: it is dropped, with all that was computed on
        it, and its request runs those tokens itself."""
        running.worsen(Quality.DAMAGED)
        if running.stage is not Stage.RELEASED and not self.costs.restores_by_reference:
            running.unlock(self.cache)
        if self.cache is not None:
            request = running.request
            self.cache.condemn(
                request.tokens(damage.end), damage.component, damage.start, request.salt
            )
        if running.runs and not running.preempting:
            self.registry.preempt(running)

    def _take_tokens(self, inflight: InflightStep, result: StepResult) -> int:
        ghosts = 0
        for row in inflight.plan.rows:
            if not row.samples:
                continue
            running = inflight.owners[row.slot]
            request = running.request
            if request.finish is not None:
                ghosts += 1
            elif running.quality is Quality.DAMAGED:
                if running.runs:
                    request.num_sampled = len(request.output)  # of no use
            elif not row.masked or row.end == request.num_tokens:  # else a grammar had forced it
                self.registry.take_tokens(request, row.slot, result)
        return ghosts
