"""Decides what each step computes and takes in what it gave. Knows no arrays and no clock.

`plan(N+1)` is made before step N's tokens are known, assuming that running requests go on. If N
shows that one stopped, its row in N+1 is a ghost: the sampled token is dropped. The row itself is
not lost: it ran the reply's last token, so what the slot holds is exactly the finished sequence.
A slot's holding is released when the step that retires it has been committed, and that step is
planned after every step with a row of it has been committed (the fence).
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

import numpy as np

from pippin.backends.base import (
    Admit,
    Costs,
    DecodeRow,
    PrefillRow,
    Restore,
    Retire,
    StepPlan,
    StepResult,
)
from pippin.cache.prefix_cache import PrefixCache
from pippin.decode.grammar import Grammar
from pippin.errors import OutOfMemory, PippinError
from pippin.messages import Submit, TokenDelta
from pippin.metrics import EngineMetrics
from pippin.scheduler import retraction
from pippin.scheduler.admission import GROWTH_TOKENS, Admission, QueueLimits
from pippin.scheduler.budget import ByteBudget
from pippin.scheduler.captures import take_captures
from pippin.scheduler.chunks import Chunk, Chunker
from pippin.scheduler.holding import Holding
from pippin.scheduler.outbox import Outbox
from pippin.scheduler.pace import SMALLEST_CHUNK, Pace
from pippin.scheduler.request import Request
from pippin.scheduler.slots import SlotPool
from pippin.scheduler.turns import Turn, share
from pippin.types import GRID, FinishReason


@dataclass(frozen=True)
class Limits:
    """The part of the configuration that the scheduler needs."""

    max_running: int = 64
    max_queue: int = 1024
    max_queue_tokens: int = 1 << 40
    prefill_tokens: int = 512
    deterministic: bool = False  # only whole grid blocks of prompts are computed alike and shared
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
        self.pace = Pace(limits.prefill_tokens)
        self.requests: dict[str, Request] = {}  # every request that has not ended
        self.holdings: dict[int, Holding] = {}  # by slot: in use, or not yet released
        self.last_ghosts = 0
        self._leaving: list[Holding] = []  # their requests have ended or are being retracted
        self._starved: list[Holding] = []  # of the last plan: no bytes to grow into
        self._in_flight: dict[int, _InFlight] = {}
        self._next_step = 0
        self._committed = -1
        self._transient_bytes = 0  # of the plan that is being made
        self._arrivals = itertools.count()
        self._came_at: dict[str, int] = {}  # prompt tokens that had been planned by then
        self._num_planned = 0  # prompt tokens, in all
        self._outbox = Outbox()
        self._seeds = random.Random()
        self._policy = None if self.cache is None else self.cache.policy
        self._chunker = Chunker(
            self.spec,
            self._policy,
            smallest=min(SMALLEST_CHUNK, limits.prefill_tokens),
            on_grid=limits.deterministic,
        )
        # What a decode step computed differs in its last bits from what a prompt's chunk would.
        self._caches_replies = self.cache is not None and not limits.deterministic
        self._captures_replies = self._caches_replies and self.spec.state_bytes > 0

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
        seed = submit.params.seed
        request = Request.from_submit(
            submit,
            seed=self._seeds.getrandbits(63) if seed is None else seed,
            arrival=next(self._arrivals),
            grammar=grammar,
        )
        self.requests[request.id] = request
        self._came_at[request.id] = self._num_planned
        self.admission.add(request)
        self.metrics.prompt_tokens += request.prompt_len

    def abort(self, request_id: str) -> None:
        self._end_early(request_id, "abort")

    def finish(self, request_id: str) -> None:
        """The server saw a stop string: what has been generated so far is the reply."""
        self._end_early(request_id, "stop")

    @property
    def has_work(self) -> bool:
        return bool(self.requests or self.holdings or self._outbox)

    @property
    def num_running(self) -> int:
        return sum(1 for holding in self.holdings.values() if holding.runs)

    # ---- plan ------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do before something is committed."""
        step = self._next_step
        self._transient_bytes = 0
        retire, retired = self._plan_retires(step)
        decode = self._plan_decodes(step)
        admit, prefill = self._plan_prefills(step, len(decode))
        plan = StepPlan(step, retire, admit, prefill, decode)
        if self._starved:
            self._make_room()
        if plan.empty:
            if not self._in_flight and not self.holdings:
                self._fail_hopeless()
            return None
        self._next_step += 1
        self._in_flight[step] = _InFlight(plan, dict(self.holdings), retired, self._transient_bytes)
        return plan

    def masks(self, plan: StepPlan) -> dict[int, np.ndarray]:
        """What the plan's grammar rows may sample, once every earlier step is committed.

        A grammar that raises ends its own request, and the row becomes a ghost.
        """
        everything = np.ones(self.spec.vocab_size, dtype=bool)
        owners = self._in_flight[plan.step].owners
        masks = {}
        for slot in plan.masked_slots:
            request = owners[slot].request
            masks[slot] = everything
            if request.running and request.grammar is not None:
                try:
                    masks[slot] = request.grammar.allowed()
                except Exception as error:  # whatever a grammar's library raises
                    self._fail(request, _grammar_error(error))
        return masks

    def _plan_retires(self, step: int) -> tuple[tuple[Retire, ...], dict[int, Holding]]:
        retire: list[Retire] = []
        retired: dict[int, Holding] = {}
        for holding in list(self._leaving):
            fenced = holding.last_step > self._committed
            if fenced or self._runs_last_token(holding):
                continue
            self._leaving.remove(holding)
            row = self._retire(step, holding)
            holding.retired, holding.captured_len = True, row.end
            retire.append(row)
            retired[holding.slot] = holding
            if holding.runs:
                self._requeue(holding.request)
        return tuple(retire), retired

    def _retire(self, step: int, holding: Holding) -> Retire:
        """Hand the row to the tree if it is worth it and there is room for a copy."""
        bare = Retire(holding.slot)
        request = holding.request
        worth = request.completed or holding.runs  # one that runs is being retracted
        if not self._caches_replies or not worth or not holding.is_exact:
            return bare
        if self.cache is not None:
            holding.in_tree = min(
                holding.in_tree, self.cache.num_held(request.tokens(holding.in_tree))
            )
        if holding.in_tree == holding.held:
            return bare
        self._shrink(holding)
        full = Retire(holding.slot, holding.in_tree, holding.held, captures=True)
        cost = self.costs.transient_bytes(StepPlan(step, retire=(full,)))
        return full if self._claim_transient(cost) else bare

    def _requeue(self, request: Request) -> None:
        request.retract()
        self.admission.add(request)
        self.metrics.retractions += 1

    def _plan_decodes(self, step: int) -> tuple[DecodeRow, ...]:
        self._starved = []
        rows: list[DecodeRow] = []
        for slot, holding in self.holdings.items():
            request = holding.request
            samples = (
                request.phase == "decode"
                and request.num_sampled < request.params.max_tokens
                and not holding.retracting
            )
            if not samples and not self._runs_last_token(holding):
                continue
            position = holding.held
            if position >= holding.row_tokens and not self._grow(holding, position + 1):
                if samples:
                    self._starved.append(holding)
                    continue
                holding.keeps_last = False  # the tree gets the reply without its last token
                continue
            request.plan_token(step, samples=samples)
            end = position + 1
            checkpoint = end % GRID == 0 and self._keeps_checkpoint(step, holding, end)
            rows.append(DecodeRow(slot, position, samples, checkpoint, request.grammar is not None))
        return tuple(rows)

    def _plan_prefills(
        self, step: int, num_streams: int
    ) -> tuple[tuple[Admit, ...], tuple[PrefillRow, ...]]:
        started = [
            holding
            for holding in self.holdings.values()
            if holding.request.phase == "prefill" and not holding.retracting
        ]
        if not started and not self.admission.queue:
            return (), ()
        left = self.pace.budget(num_streams, len(started) + len(self.admission.queue))
        shortest = self.admission.shortest() if self._may_start(left) else None
        turns = [
            Turn(holding.num_left, self._num_planned - self._came_at[holding.request.id])
            for holding in started
        ]
        rows: list[PrefillRow] = []
        for holding, tokens in zip(
            started, share(turns, left, shortest_waiting=shortest), strict=True
        ):
            if tokens >= self._chunker.least(holding.num_left):
                rows.append(self._prefill_row(step, holding, tokens))
                left -= len(rows[-1].tokens)
        admit = self._start_others(step, left, rows)
        self._num_planned += sum(len(row.tokens) for row in rows)
        return tuple(admit), tuple(rows)

    def _start_others(self, step: int, left: int, rows: list[PrefillRow]) -> list[Admit]:
        """Start whoever finds a slot, bytes and a part of this step; adds their rows."""
        admit: list[Admit] = []
        arriving: dict[bytes, list[Holding]] = {}
        if self._may_start(left):
            arriving = self._arriving()
        while self._may_start(left):
            holding = self.admission.start_next(arriving, nothing_runs=not self.holdings)
            if holding is None:
                break
            self._start(holding)
            arriving.setdefault(holding.request.key, []).append(holding)
            admit.append(_admit(holding))
            rows.append(self._prefill_row(step, holding, left, self._restore(holding)))
            left -= len(rows[-1].tokens)
        return admit

    def _may_start(self, left: int) -> bool:
        """Whether somebody waits, and finds a slot and enough of this step.

        Bytes that are given back go to those that starve before anybody new. A reply that may not
        be resumed (`deterministic`) must never need what others hold, so it starts with all that
        it can need, or has the engine to itself.
        """
        if not self.admission.queue or self._starved or not self.slots.num_free:
            return False
        if self.limits.deterministic:
            held = self.holdings.values()
            if any(h.row_tokens < h.request.max_total for h in held if h.runs):
                return False
        return left >= self._chunker.smallest

    def _arriving(self) -> dict[bytes, list[Holding]]:
        """Who is bringing a prefix to the tree, by what it begins with."""
        found: dict[bytes, list[Holding]] = {}
        for holding in self.holdings.values():
            if holding.num_arriving > holding.in_tree and (key := holding.request.key):
                found.setdefault(key, []).append(holding)
        return found

    def _start(self, holding: Holding) -> None:
        self.holdings[holding.slot] = holding
        request = holding.request
        if request.num_retractions == 0:
            request.cached_len = holding.start_len
            self.metrics.cached_tokens += holding.start_len

    def _restore(self, holding: Holding) -> Restore | None:
        if self.cache is None or holding.lock is None or holding.start_len == 0:
            return None
        return Restore(holding.start_len, self.cache.payloads(holding.lock))

    def _prefill_row(
        self, step: int, holding: Holding, num_tokens: int, restore: Restore | None = None
    ) -> PrefillRow:
        chunk = self._chunker.next_chunk(holding, num_tokens)
        request = holding.request
        request.plan_chunk(step, chunk.end)
        row = PrefillRow(
            slot=holding.slot,
            start=chunk.start,
            tokens=request.tokens(chunk.end)[chunk.start :],
            samples=chunk.end == holding.prefill_len,
            restore=restore,
            checkpoints=chunk.checkpoints,
            captures=chunk.captures,
            masked=request.grammar is not None,
        )
        return self._within_budget(step, holding, chunk, row)

    def _within_budget(
        self, step: int, holding: Holding, chunk: Chunk, row: PrefillRow
    ) -> PrefillRow:
        """The row as it is, with its last state alone, or without captures: what there is room for.

        Without its KV in the tree the following chunks would not connect: they capture nothing.
        """
        if not chunk.captures:
            return row
        for kept in (chunk.checkpoints, chunk.checkpoints[-1:], ()):
            tried = replace(row, checkpoints=kept)
            if self._claim_transient(self.costs.transient_bytes(StepPlan(step, prefill=(tried,)))):
                return tried
        holding.lost_tree(holding.in_tree)
        return replace(row, checkpoints=(), captures=False)

    def _runs_last_token(self, holding: Holding) -> bool:
        """Whether a reply's last token is still to be run, so that the tree gets all of it.

        Once every sample is planned, the next step can do so before that token is known.
        """
        if not self._caches_replies or not holding.keeps_last or holding.num_left > 0:
            return False
        if holding.retracting or holding.retired:
            return False
        request = holding.request
        if request.phase == "decode":
            return not request.samples_left and holding.held < request.max_total
        return request.completed and not holding.tainted and holding.held < request.num_tokens

    # ---- bytes -----------------------------------------------------------------------------

    def _claim_transient(self, nbytes: int) -> bool:
        """For captures of the plan that is being made, until that is committed."""
        if not self.budget.claim(nbytes):
            return False
        self._transient_bytes += nbytes
        return True

    def _grow(self, holding: Holding, num_tokens: int) -> bool:
        """Claim for a reply of `num_tokens` and some more, or failing that just for it."""
        ahead = min(holding.request.max_total, num_tokens + GROWTH_TOKENS)
        return self._resize(holding, ahead) or self._resize(holding, num_tokens)

    def _resize(self, holding: Holding, row_tokens: int) -> bool:
        nbytes = self._row_bytes(holding, row_tokens)
        extra = max(0, nbytes - holding.nbytes)
        if not self.budget.claim(extra):
            return False
        holding.nbytes += extra
        holding.row_tokens = row_tokens
        return True

    def _shrink(self, holding: Holding) -> None:
        """The row will not grow any more."""
        surplus = holding.nbytes - self._row_bytes(holding, holding.held)
        if surplus > 0:
            holding.nbytes -= surplus
            self.budget.release(surplus)

    def _row_bytes(self, holding: Holding, row_tokens: int) -> int:
        return self.costs.row_bytes(row_tokens, holding.start_len)

    def _keeps_checkpoint(self, step: int, holding: Holding, position: int) -> bool:
        """Whether the state after `position` tokens of a reply is worth keeping, and fits.

        Where it does not, earlier ones of the same reply make room: the last ones matter most.
        """
        if self._policy is None or not self._captures_replies:
            return False
        if not self._policy.captures_decode(position):
            return False
        row = DecodeRow(holding.slot, position - 1, checkpoint=True)
        cost = self.costs.transient_bytes(StepPlan(step, decode=(row,)))
        if self._claim_transient(cost):
            return True
        self._thin(holding)
        return self._claim_transient(cost)

    def _thin(self, holding: Holding) -> None:
        """Keep half of a reply's checkpoints."""
        assert self._policy is not None
        kept = self._policy.thinned(list(holding.checkpoints), len(holding.checkpoints) // 2)
        dropped = set(holding.checkpoints).difference(kept)
        holding.drop_checkpoints(dropped, self.budget)

    def _make_room(self) -> None:
        """Running replies have outgrown the budget: give up checkpoints, then retract somebody.

        Whoever starves goes on in a later plan. Where nothing can be given up and nothing is on
        its way back, one request is larger than all there is.
        """
        need = sum(
            self._row_bytes(holding, holding.held + 1) - holding.nbytes for holding in self._starved
        )
        for holding in self.holdings.values():
            while holding.checkpoints and self.budget.available < need:
                self._thin(holding)
        shortage = need - self.budget.available
        if shortage <= 0:
            return
        running = [holding for holding in self.holdings.values() if holding.runs]
        for holding in retraction.choose(running, shortage):
            holding.retracting = True
            self._leaving.append(holding)
        if len(self.holdings) == 1 and not self._in_flight:
            self._fail_too_large(self._starved[0])

    def _fail_too_large(self, holding: Holding) -> None:
        need, capacity = self._row_bytes(holding, holding.held + 1), self.budget.capacity
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
        if self.cache is not None:
            take_captures(result.captures, flight.owners, flight.retired, self.cache, self.budget)
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
        for row in flight.plan.rows:
            holding = flight.owners[row.slot]
            holding.tainted = True
            if holding.runs:
                self._fail(holding.request, error)
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
        slots, owners, tokens = flight.plan.sampled_slots, flight.owners, result.tokens
        ghosts = 0
        for slot in slots:
            request = owners[slot].request
            if request.finish is not None:
                ghosts += 1
                continue
            token = tokens[slot]
            reason = request.append(token)
            if request.grammar is not None and not self._advance(request, token):
                continue
            self._outbox.token(request, slot, token, result, reason)
            if reason is not None:
                self._end(request, reason)
                self.metrics.requests_finished += 1
        self.last_ghosts = ghosts
        self.metrics.generated_tokens += len(slots) - ghosts

    def _advance(self, request: Request, token: int) -> bool:
        """Tell the grammar; one that raises ends its own request."""
        assert request.grammar is not None
        try:
            request.grammar.advance(token)
        except Exception as error:  # whatever a grammar's library raises
            self._fail(request, _grammar_error(error))
            return False
        return True

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

    def _fail(self, request: Request, error: Exception) -> None:
        self._outbox.error(request.id, error)
        self._end(request, "error")
        self.metrics.requests_failed += 1

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.phase == "waiting":
            self.admission.remove(request)
        elif request.holding is not None and not request.holding.retracting:
            self._leaving.append(request.holding)
        request.end(reason)
        del self.requests[request.id], self._came_at[request.id]

    def _release(self, holding: Holding) -> None:
        holding.release(self.budget, self.slots, self.cache)
        del self.holdings[holding.slot]


def _admit(holding: Holding) -> Admit:
    """A request that is resumed was told its prompt's log probabilities before."""
    request = holding.request
    params = request.params
    if request.output and params.prompt_logprobs is not None:
        params = replace(params, prompt_logprobs=None)
    return Admit(
        slot=holding.slot,
        params=params,
        stop_ids=tuple(sorted(request.stop_ids)),
        prompt=request.prompt,
        seed=request.seed,
        reply=np.asarray(request.output, dtype=np.int32),
    )


def _grammar_error(error: Exception) -> PippinError:
    return PippinError(f"the grammar failed: {str(error) or repr(error)}")
