"""Decides what each step computes and takes in what it gave. Knows no arrays and no clock.

`plan(N+1)` is made before step N's tokens are known, assuming that running requests go on. If N
shows that one stopped, its row in N+1 is a ghost: the sampled token is dropped. The row itself is
not lost: it ran the reply's last token, so what the slot holds is exactly the finished sequence.
A slot is given back only in a plan made after every step with a row of it has been committed.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import numpy as np

from pippin.backends.base import Admit, DecodeRow, PrefillRow, Restore, Retire, StepPlan, StepResult
from pippin.cache.prefix_cache import Match, PrefixCache
from pippin.decode.grammar import Grammar
from pippin.errors import ContextOverflow, OutOfMemory, Overloaded, PippinError
from pippin.messages import Submit, TokenDelta
from pippin.metrics import EngineMetrics
from pippin.scheduler.admission import GROWTH_TOKENS, Admission, ByteBudget
from pippin.scheduler.pace import Pace
from pippin.scheduler.request import Phase, Request
from pippin.scheduler.slots import SlotPool
from pippin.types import GRID, FinishReason, ModelSpec, Payload, TokenLogprobs


@dataclass(frozen=True)
class Limits:
    """The part of the configuration that the scheduler needs."""

    max_running: int = 64
    max_queue: int = 1024
    prefill_tokens: int = 512
    capacity_bytes: int = 1 << 40


@dataclass
class _InFlight:
    """A launched plan and who owned each slot in it; slots may change hands before its commit."""

    plan: StepPlan
    owners: dict[int, Request]
    retired: dict[int, Request]
    ghosts: int = 0


@dataclass
class Scheduler:
    spec: ModelSpec
    limits: Limits = field(default_factory=Limits)
    cache: PrefixCache | None = None
    metrics: EngineMetrics = field(default_factory=EngineMetrics)

    def __post_init__(self) -> None:
        self.slots = SlotPool(self.limits.max_running)
        self.budget = ByteBudget(self.spec, self.limits.capacity_bytes, self.cache)
        self.admission = Admission(self.budget, self.cache)
        self.pace = Pace(self.limits.prefill_tokens)
        self.requests: dict[str, Request] = {}  # every request not yet RETIRED
        self.active: dict[int, Request] = {}  # by slot
        self._in_flight: dict[int, _InFlight] = {}
        self._steps = itertools.count()
        self._arrivals = itertools.count()
        self._committed = -1
        self._outbox: list[TokenDelta] = []
        self._seeds = random.Random()
        self.last_ghosts = 0
        self.policy = None if self.cache is None else self.cache.policy

    # ---- what the outside asks for -------------------------------------------------------

    def add(self, submit: Submit, grammar: Grammar | None = None) -> None:
        """Queue a request, or answer it at once with an error delta."""
        try:
            self._check(submit)
        except PippinError as error:
            self._outbox.append(_error_delta(submit.id, error))
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
        step = next(self._steps)
        retire, retired = self._plan_retires()
        decode = self._plan_decodes(step)
        admit, prefill = self._plan_prefills(step, num_streams=len(decode))
        plan = StepPlan(step, retire, admit, prefill, decode)
        if plan.empty:
            self._steps = itertools.count(step)  # steps are numbered without gaps
            return None
        owners = {row.slot: self.active[row.slot] for row in (*prefill, *decode)}
        self._in_flight[step] = _InFlight(plan, owners, retired)
        return plan

    def masks(self, plan: StepPlan) -> dict[int, np.ndarray]:
        """What the plan's grammar rows may sample, once every earlier step is committed."""
        everything = np.ones(self.spec.vocab_size, dtype=bool)
        owners = self._in_flight[plan.step].owners
        masks = {}
        for slot in plan.masked_slots:
            request = owners[slot]
            ghost = request.phase is Phase.DONE or request.grammar is None
            masks[slot] = everything if ghost else _allowed(request.grammar)
        return masks

    def _plan_retires(self) -> tuple[tuple[Retire, ...], dict[int, Request]]:
        retire: list[Retire] = []
        retired: dict[int, Request] = {}
        for slot, request in sorted(self.active.items()):
            fenced = request.last_step > self._committed
            if request.phase is not Phase.DONE or fenced or self._must_absorb(request):
                continue
            captures = self.cache is not None and request.finish in ("stop", "length")
            retire.append(Retire(slot, request.in_tree, request.held, captures))
            retired[slot] = request
            self._give_back(request, keep_states=captures)
        return tuple(retire), retired

    def _plan_decodes(self, step: int) -> tuple[DecodeRow, ...]:
        rows: list[DecodeRow] = []
        for slot, request in sorted(self.active.items()):
            absorbs = self._must_absorb(request) or self._absorbs_next(request)
            more = request.phase is Phase.DECODE and request.num_sampled < request.params.max_tokens
            if not (absorbs or more) or not self._room_for(request, request.held + 1):
                continue
            position = request.held
            request.held += 1
            request.num_sampled += more
            request.last_step = step
            rows.append(
                DecodeRow(
                    slot,
                    position,
                    samples=more,
                    checkpoint=self._wants_reply_checkpoint(request),
                    masked=request.grammar is not None,
                )
            )
        return tuple(rows)

    def _plan_prefills(
        self, step: int, num_streams: int
    ) -> tuple[tuple[Admit, ...], tuple[PrefillRow, ...]]:
        left = self.pace.budget(num_streams)
        admit: list[Admit] = []
        rows: list[PrefillRow] = []
        started = sorted(
            (r for r in self.active.values() if r.phase is Phase.PREFILL), key=lambda r: r.arrived
        )
        for request in started:
            if left <= 0:
                break
            rows.append(self._chunk(step, request, left, restore=None))
            left -= len(rows[-1].tokens)
        while left > 0 and self.slots.num_free and self.admission.queue:
            picked = self.admission.pick(self.active.values())
            if picked is None:
                self._fail_what_never_fits()
                break
            request, match = picked
            restore = self._start(request, match)
            admit.append(_admit(request))
            rows.append(self._chunk(step, request, left, restore))
            left -= len(rows[-1].tokens)
        return tuple(admit), tuple(rows)

    def _start(self, request: Request, match: Match | None) -> Restore | None:
        request.slot = self.slots.take()
        request.phase = Phase.PREFILL
        self.active[request.slot] = request
        if match is None:
            return None
        request.cached_len = request.held = request.in_tree = match.length
        request.branch = match.branch
        self.metrics.cached_tokens += match.length
        if match.length == 0:
            return None
        assert self.cache is not None and request.lock is not None
        return Restore(match.length, self.cache.payloads(request.lock))

    def _chunk(
        self, step: int, request: Request, budget: int, restore: Restore | None
    ) -> PrefillRow:
        start = request.held
        end = self._chunk_end(request, start, min(request.prompt_len, start + budget))
        last = end == request.prompt_len
        captures = self.cache is not None and not request.wants_prompt_logprobs
        checkpoints = self._checkpoints(request, start, end) if captures else ()
        request.held = end
        request.last_step = step
        if last:
            request.phase = Phase.DECODE
            request.num_sampled = 1
        return PrefillRow(
            slot=request.slot,
            start=start,
            tokens=request.prompt[start:end],
            samples=last,
            restore=restore,
            checkpoints=checkpoints,
            captures=captures,
            masked=request.grammar is not None,
        )

    def _chunk_end(self, request: Request, start: int, end: int) -> int:
        """Where a chunk that may reach `end` should stop.

        A chunk that does not end the prompt ends on the grid if it can, so that its end is a
        checkpoint. States inside it can be tapped only every GRID tokens from its start, and only
        if the backend taps at all: otherwise it ends at the first checkpoint wanted.
        """
        if end < request.prompt_len and end - end % GRID > start:
            end -= end % GRID
        for position in self._checkpoints(request, start, end):
            tappable = self.spec.state_taps and (position - start) % GRID == 0
            if not tappable:
                return position
        return end

    def _checkpoints(self, request: Request, start: int, end: int) -> tuple[int, ...]:
        if self.policy is None or not self.spec.state_bytes or request.wants_prompt_logprobs:
            return ()
        return self.policy.positions(
            start,
            end,
            prompt_len=request.prompt_len,
            boundaries=request.boundaries,
            branch=request.branch,
        )

    def _wants_reply_checkpoint(self, request: Request) -> bool:
        return (
            self.policy is not None
            and bool(self.spec.state_bytes)
            and self.policy.captures_decode(request.held)
        )

    def _must_absorb(self, request: Request) -> bool:
        """Whether a finished reply's last token is still to be run for its state to be complete."""
        return (
            request.will_be_cached
            and self.cache is not None
            and bool(self.spec.state_bytes)
            and request.held < request.num_tokens
        )

    def _absorbs_next(self, request: Request) -> bool:
        """Every sample is planned: the next step can run the last token before it is known."""
        return (
            request.phase is Phase.DECODE
            and self.cache is not None
            and bool(self.spec.state_bytes)
            and request.num_sampled == request.params.max_tokens
            and request.held < request.prompt_len + request.num_sampled
        )

    def _room_for(self, request: Request, num_tokens: int) -> bool:
        if num_tokens <= request.reserved_tokens:
            return True
        wanted = min(request.max_total, num_tokens + GROWTH_TOKENS)
        if self.budget.try_reserve(request, wanted):
            return True
        need, capacity = self.budget.row_bytes(wanted), self.budget.capacity
        self._fail(
            request,
            OutOfMemory(
                f"the reply reached {num_tokens:,} tokens and needs {need:,} bytes; "
                f"{self.budget.reserved:,} of {capacity:,} are in use"
            ),
        )
        return False

    # ---- commit ----------------------------------------------------------------------------

    def commit(self, step: int, result: StepResult) -> list[TokenDelta]:
        """Take in a finished step: tokens, finishes, captures. Returns what clients are owed."""
        flight = self._in_flight.pop(step)
        assert step == self._committed + 1, "steps are committed in order"
        self._committed = step
        self._take_captures(flight, result)
        for slot in flight.plan.sampled_slots:
            request = flight.owners[slot]
            if request.phase is Phase.DONE:
                flight.ghosts += 1
                continue
            self._append(request, result, slot)
        self.last_ghosts = flight.ghosts
        return self.take_outbox()

    def fail_step(self, step: int, error: Exception) -> list[TokenDelta]:
        """The backend could not run a plan: its requests fail, the others go on."""
        flight = self._in_flight.pop(step)
        self._committed = step
        for request in flight.owners.values():
            if request.running:
                self._fail(request, error)
        return self.take_outbox()

    def take_outbox(self) -> list[TokenDelta]:
        deltas, self._outbox = self._outbox, []
        return deltas

    def _append(self, request: Request, result: StepResult, slot: int) -> None:
        token = result.tokens[slot]
        request.output.append(token)
        if request.grammar is not None:
            request.grammar.advance(token)
        reason = request.finish_reason_after(token)
        logprobs = result.logprobs.get(slot)
        self.metrics.generated_tokens += 1
        self._outbox.append(
            TokenDelta(
                id=request.id,
                tokens=[token],
                logprobs=[logprobs] if logprobs is not None else None,
                prompt_logprobs=_as_list(result.prompt_logprobs.get(slot)),
                cached_tokens=None if request.announced else request.cached_len,
                finish=reason,
            )
        )
        request.announced = True
        if reason is not None:
            self._done(request, reason)
            self.metrics.requests_finished += 1

    def _take_captures(self, flight: _InFlight, result: StepResult) -> None:
        for capture in result.captures:
            owner = (flight.retired if capture.retired else flight.owners)[capture.slot]
            if not capture.retired and capture.start >= owner.prompt_len:
                owner.states.update(capture.states)  # a reply's checkpoint: kept until it ends
                continue
            states = dict(capture.states)
            if capture.retired:
                states |= self._usable_states(owner, capture.end)
            assert self.cache is not None
            self.cache.insert(owner.tokens(capture.end), capture.start, capture.kv, states)
            owner.in_tree = max(owner.in_tree, capture.end)

    def _usable_states(self, owner: Request, end: int) -> dict[int, Payload]:
        usable = {at: state for at, state in owner.states.items() if at <= end}
        for at in owner.states.keys() - usable.keys():
            owner.states[at].release()  # taken by a ghost, past the reply's end
        owner.states = {}
        return usable

    # ---- ends ------------------------------------------------------------------------------

    def _end_early(self, request_id: str, reason: FinishReason) -> None:
        request = self.requests.get(request_id)
        if request is None or request.finish is not None:
            return  # it ended by itself while the message was on its way
        self._outbox.append(TokenDelta(id=request.id, finish=reason))
        self._done(request, reason)
        if reason == "abort":
            self.metrics.requests_aborted += 1
        else:
            self.metrics.requests_finished += 1

    def _done(self, request: Request, reason: FinishReason) -> None:
        request.finish = reason
        if request.phase is Phase.WAITING:
            self.admission.remove(request)
            request.phase = Phase.RETIRED
            del self.requests[request.id]
        else:
            request.phase = Phase.DONE

    def _fail(self, request: Request, error: Exception) -> None:
        self._outbox.append(_error_delta(request.id, error))
        self._done(request, "error")
        self.metrics.requests_failed += 1

    def _give_back(self, request: Request, *, keep_states: bool) -> None:
        if not keep_states:
            for state in request.states.values():
                state.release()
            request.states = {}
        if request.lock is not None and self.cache is not None:
            self.cache.unlock(request.lock)
            request.lock = None
        self.budget.release(request)
        self.slots.give_back(request.slot)
        del self.active[request.slot]
        del self.requests[request.id]
        request.phase = Phase.RETIRED

    def _fail_what_never_fits(self) -> None:
        """With nothing running, a request that cannot be reserved will never fit: say so."""
        if self.active:
            return
        request = self.admission.queue[0]
        need, capacity = self.budget.row_bytes(request.prompt_len), self.budget.capacity
        if need > capacity:
            self._fail(
                request,
                OutOfMemory(f"the request needs {need:,} bytes, the budget holds {capacity:,}"),
            )

    def _check(self, submit: Submit) -> None:
        prompt_len, limit = len(submit.tokens), self.spec.max_len
        if prompt_len + submit.params.max_tokens > limit:
            raise ContextOverflow(
                f"prompt is {prompt_len:,} tokens and max_tokens {submit.params.max_tokens:,}, "
                f"the model holds {limit:,}"
            )
        if len(self.admission.queue) >= self.limits.max_queue:
            raise Overloaded(
                f"{len(self.admission.queue):,} requests are waiting, the queue holds "
                f"{self.limits.max_queue:,}"
            )


def _admit(request: Request) -> Admit:
    stop_ids = tuple(sorted(request.stop_ids))
    return Admit(request.slot, request.params, stop_ids, request.prompt, request.seed)


def _allowed(grammar: Grammar | None) -> np.ndarray:
    assert grammar is not None
    return grammar.allowed()


def _as_list(logprobs: tuple[TokenLogprobs, ...] | None) -> list[TokenLogprobs] | None:
    return None if logprobs is None else list(logprobs)


def _error_delta(request_id: str, error: Exception) -> TokenDelta:
    if isinstance(error, PippinError):
        return TokenDelta(
            id=request_id,
            finish="error",
            error=error.message,
            error_code=error.code,
            error_status=error.status,
        )
    return TokenDelta(
        id=request_id, finish="error", error=str(error), error_code="internal_error"
    )
