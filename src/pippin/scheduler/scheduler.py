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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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
from pippin.errors import OutOfMemory, PippinError
from pippin.messages import Submit, TokenDelta
from pippin.metrics import EngineMetrics, StepRecord
from pippin.scheduler.admission import Admission
from pippin.scheduler.memory import Claims
from pippin.scheduler.pace import CostModel, Pace, Timed
from pippin.scheduler.prompts import PromptPlanner
from pippin.scheduler.replies import (
    Followed,
    GrammarWork,
    ReplyPlanner,
    append_forced,
    append_tokens,
    client_error,
    make_masks,
)
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
from pippin.types import GRID, FinishReason, TokenLogprobs


class Observer(Protocol):
    """Called from the loop's thread, while the device works where that can be so. Never raises."""

    def request_changed(self, request: Request) -> None:
        """It arrived, or is in another phase."""
        ...

    def step_launched(self, plan: StepPlan, running_slots: Mapping[int, RunningSlot]) -> None:
        """`running_slots`: by slot, as of now."""
        ...

    def step_committed(self, plan: StepPlan, record: StepRecord) -> None: ...


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
        self.grammars = GrammarWork(self.compiler, self.spec.vocab_size)
        self.traffic = Traffic(self.tiers, self.costs, self.budget, self.cache, self.pushes)
        self._claims = Claims(self.costs, self.budget, self.cache)
        self.requests: dict[str, Request] = {}  # that have not ended
        self.running_slots: dict[int, RunningSlot] = {}  # by slot: in use, or not yet released
        self.leaving: list[RunningSlot] = []  # their requests have ended or are being preempted
        self._outbox: list[TokenDelta] = []
        self.observer: Observer | None = None  # None: events are not watched
        if self.speculation is not None:
            self.metrics.drafters.update(self.speculation.no_counts)
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
            *(self.admission, self.slots, self._claims, self.running_slots, limits),
            speculation=self.speculation,
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
            self._send_error(submit.id, error)
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
        self.requests[request.id] = request
        self.metrics.prompt_tokens += request.prompt_len
        if grammar is None and submit.params.grammar is not None:
            self.grammars.compile(request, submit.params.grammar)
        else:
            self.admission.add(request)
        self._notify(request)

    def check(self, submit: Submit) -> None:
        """Raise for a request that could never start, or that finds the queue full."""
        self.admission.check(submit, self.coming)

    @property
    def coming(self) -> list[Request]:
        """They will be in the queue when something is compiled or loaded for them."""
        return self.grammars.coming + self.traffic.loading

    @property
    def num_waiting(self) -> int:
        return len(self.admission.queue) + len(self.coming)

    @property
    def has_work(self) -> bool:
        if self.requests or self.running_slots or self._outbox:
            return True
        return self.traffic.busy

    @property
    def running(self) -> list[RunningSlot]:
        return [running for running in self.running_slots.values() if running.runs]

    # ---- plan ------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do before something is committed."""
        if self.pushes is not None and self.pushes.waits and not self.inflight_steps:
            sent = self.plan_spill()  # before the next chunk is computed, not behind it
            if sent is not None:
                return sent
        step = self.next_step
        if self.grammars.pending:
            self._take_grammars()
        if self.traffic.tiers:
            for request in self.traffic.start_loads(self.admission, self.pace.compute_seconds):
                self._notify(request)
        retire, retired = self._plan_retires(step) if self.leaving else ((), {})
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
            self._count_started(admit)
        if replies.starved:
            self._make_room(replies.starved)
        moves = self.traffic.plan(step) if self.traffic.moves else ((), ())
        plan = StepPlan(step, retire, admit, prefill, tuple(replies.decode), *moves)
        if plan.empty:
            waits = self.inflight_steps or self.running_slots or self.traffic.loads_under_way
            if not waits and (hopeless := self.admission.refused) is not None:
                need = self.costs.row_bytes(hopeless.num_tokens + 1)
                self._fail_large(hopeless, hopeless.num_tokens, need)
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
        return make_masks(plan, owners, self.spec.vocab_size, self.fail)

    def _plan_retires(self, step: int) -> tuple[tuple[Retire, ...], dict[int, RunningSlot]]:
        retire: list[Retire] = []
        retired: dict[int, RunningSlot] = {}
        for running in list(self.leaving):
            if running.last_step > self.committed or self._replies.runs_last_token(running):
                continue
            self.leaving.remove(running)
            retire.append(self._replies.retire(step, running))
            retired[running.slot] = running
            if running.runs:
                self._requeue(running)
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
                self._taint(owner, overflow)
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
            self._taint(inflight.owners[row.slot], error)
        for running in inflight.retired.values():
            running.worsen(Quality.TAINTED)
            self.leaving.append(running)

    def fail_all(self, error: Exception) -> None:
        """The engine is about to stop: every request ends with an error."""
        for request in list(self.requests.values()):
            self.fail(request, error)

    def take_outbox(self) -> list[TokenDelta]:
        deltas, self._outbox = self._outbox, []
        return deltas

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
            self.preempt(running)

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
                self._take_reply(request, row.slot, result)
        return ghosts

    # ---- arrives, waits, runs --------------------------------------------------------------

    def _take_grammars(self) -> None:
        """Requests whose grammars are compiled get into the queue; replies whose masks are there go
        on."""
        compiled: list[str] = []
        for request, future in self.grammars.take_done():
            try:
                found = future.result()
                if isinstance(found, Followed):
                    self._take_forced(request, found)
                else:
                    compiled.append(request.id)
                    request.grammar = found.copy()
                    if request.grammar.slow:
                        self.grammars.follow(request)
            except Exception as error:  # whatever a grammar's library raises
                self.fail(request, client_error(error))
                continue
            if request.phase == "compiling":
                request.phase = "waiting"
                self._enqueue(request)
        if compiled:
            self.grammars.on_compiled(compiled)

    def _take_forced(self, request: Request, followed: Followed) -> None:
        tokens, reason = append_forced(request, followed.forced)
        if reason is None and followed.finished:
            reason = "stop"
        request.mask = followed.mask
        self.metrics.generated_tokens += len(tokens)
        self.metrics.forced_tokens += len(tokens)
        if tokens or reason is not None:
            self._send(request, reason, tokens)
        if reason is not None:
            self._finish(request, reason)

    def _enqueue(self, request: Request) -> None:
        if request.followed:
            request.phase = "compiling"
        else:
            self.admission.add(request)
        self._notify(request)

    def _count_started(self, admit: Sequence[Admit]) -> None:
        for request in (self.running_slots[started.slot].request for started in admit):
            if not request.num_preemptions and not request.starts_again:
                self.metrics.cached_tokens += request.cached_len
                self.metrics.host_tokens += request.host_len
                self.metrics.disk_tokens += request.disk_len
                self.metrics.peer_tokens += request.peer_len

    def preempt(self, running: RunningSlot) -> None:
        """Its slot is retired, and then its request queued again: `requeue`."""
        running.enter(Stage.PREEMPTING)
        self.leaving.append(running)

    def _requeue(self, running: RunningSlot) -> None:
        request = running.request
        num_before = request.num_preemptions
        request.requeue(damaged=running.quality is Quality.DAMAGED)
        self.metrics.preemptions += request.num_preemptions - num_before
        self._enqueue(request)

    def _take_reply(self, request: Request, slot: int, result: StepResult) -> None:
        """What a step drew for it, and what its grammar forces after that; it may end with it."""
        if request.embeds:
            vector = result.hidden[slot]  # float32 [hidden]
            self._send_first(request, embedding=vector.tobytes(), finish="stop")
            self._finish(request, "stop")
            return
        request.mask = None
        # Where a row of it is in flight, as when it has just become slow, its mask is awaited.
        in_thread = request.grammar is not None and request.grammar.slow and not request.in_flight
        try:
            tokens, reason = append_tokens(request, result.tokens[slot], in_thread=in_thread)
        except Exception as error:  # whatever a grammar's library raises
            self.fail(request, client_error(error))
            return
        scored = result.logprobs.get(slot)
        logprobs = None if scored is None else list(scored)
        if len(request.output) > len(tokens):
            self._send(request, reason, tokens, logprobs)
        else:
            scores = result.prompt_logprobs.get(slot)
            prompt_logprobs = None if scores is None else list(scores)
            both = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
            self._send_first(request, tokens=tokens, finish=reason, **both)
        self.metrics.generated_tokens += len(tokens)
        self.metrics.forced_tokens += len(tokens) - len(result.tokens[slot])
        if reason is not None:
            self._finish(request, reason)
        elif in_thread:
            self.grammars.follow(request, result.tokens[slot])

    def _send(
        self,
        request: Request,
        finish: FinishReason | None,
        tokens: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        """Tokens of a reply, or its end; without `finish` more follow."""
        self._outbox.append(
            TokenDelta(
                request.id,
                tokens or [],
                logprobs,
                accepted_drafts=request.accepted_drafts,
                rejected_drafts=request.rejected_drafts,
                finish=finish,
            )
        )

    def _send_first(self, request: Request, **fields: Any) -> None:
        """Of a reply: it also says what the cache saved."""
        self._outbox.append(
            TokenDelta(
                id=request.id,
                cached_tokens=request.cached_len,
                host_tokens=request.host_len,
                disk_tokens=request.disk_len,
                peer_tokens=request.peer_len,
                queued_s=request.queued_s,
                **fields,
            )
        )

    def _send_error(self, request_id: str, error: Exception) -> None:
        known = error if isinstance(error, PippinError) else PippinError("")
        self._outbox.append(
            TokenDelta(
                id=request_id,
                finish="error",
                error=str(error) or repr(error),
                error_code=known.code,
                error_status=known.status,
                error_param=known.param,
            )
        )
        self.metrics.requests_failed += 1

    def _notify(self, request: Request) -> None:
        if self.observer is not None:
            self.observer.request_changed(request)

    # ---- ends ------------------------------------------------------------------------------

    def abort(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is not None:  # else it ended by itself while the message was on its way
            self._send(request, "abort")
            self._end(request, "abort")
            self.metrics.requests_aborted += 1

    def finish(self, request_id: str) -> None:
        """The server saw a stop string: what has been generated so far is the reply."""
        request = self.requests.get(request_id)
        if request is not None:  # likewise
            self._send(request, "stop")
            self._finish(request, "stop")

    def _taint(self, running: RunningSlot, error: Exception) -> None:
        """Nothing that its row holds, or will hold, is to be used: its request fails."""
        running.worsen(Quality.TAINTED)
        if running.runs:
            self.fail(running.request, error)

    def fail(self, request: Request, error: Exception) -> None:
        self._send_error(request.id, error)
        self._end(request, "error")

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._end(request, reason)
        self.metrics.requests_finished += 1

    def _end(self, request: Request, reason: FinishReason) -> None:
        self.grammars.remove(request)
        if request.phase == "loading":
            self.traffic.remove(request)
        elif request.phase == "waiting":
            self.admission.remove(request)
        elif request.running and not (running := self.running_slots[request.slot]).preempting:
            self.leaving.append(running)
        request.end(reason)
        if request.grammar is not None and self.compiler is not None:
            self.compiler.trim()  # a grammar that has grown with the reply is forgotten
        if self.pushes is not None and request.handover:
            why = "" if request.completed else f"the request ended: {request.finish}"
            self.pushes.end(request, why)
        del self.requests[request.id]
        if self.speculation is not None:
            self.speculation.forget(request)
        self._notify(request)

    # ---- bytes are short -------------------------------------------------------------------

    def _make_room(self, starved: Sequence[RunningSlot]) -> None:
        """Give up checkpoints, loads and hand-overs, then preempt requests.

        Those starved go on in a later plan. Where nothing can be given up and no step in flight
        releases bytes, one request is larger than the budget.
        """

        def shortage() -> int:
            return self._claims.shortage(starved, self.running_slots.values())

        self.traffic.give_up(shortage)
        if (nbytes := shortage()) <= 0:
            return
        for running in requests_to_preempt(self.running, nbytes):
            self.preempt(running)
        if len(self.running_slots) == 1 and not self.inflight_steps:
            self._start_over(starved[0])

    def _start_over(self, running: RunningSlot) -> None:
        """Alone, and out of bytes. What it borrowed from the tree comes with a state and more that
        a row of its own does without: then it is preempted; or else it is too large."""
        length = running.row_len + 1
        fits = self.costs.row_bytes(length) <= self.budget.capacity
        if running.lock is None or not fits:
            need = self._claims.row_bytes(running, length)
            self._fail_large(running.request, length - 1, need)
        elif not running.preempting:
            self.preempt(running)

    def _fail_large(self, request: Request, num_tokens: int, need: int) -> None:
        """It has outgrown the whole budget."""
        message = (
            f"the request reached {num_tokens:,} tokens and needs {need:,} bytes, "
            f"the budget holds {self.budget.capacity:,}"
        )
        self.fail(request, OutOfMemory(message))


def requests_to_preempt(candidates: Sequence[RunningSlot], nbytes: int) -> list[RunningSlot]:
    """The least that gives `nbytes` back, cheapest first; all but the senior one if that is less.

    Those that are being preempted already count, and are not named again.
    """
    if not candidates:
        return []
    senior = min(candidates, key=lambda running: running.request.rank)
    chosen: list[RunningSlot] = []
    freed = sum(running.freed_bytes for running in candidates if running.preempting)
    for running in sorted(candidates, key=_cost):
        if freed >= nbytes:
            break
        if running is not senior and not running.preempting:
            chosen.append(running)
            freed += running.freed_bytes
    return chosen


def _cost(running: RunningSlot) -> tuple[int, int, int]:
    """Low priority first; then the fewest blocks to run again; then the youngest."""
    request = running.request
    return running.priority, (running.row_len - running.in_tree) // GRID, -request.arrival
