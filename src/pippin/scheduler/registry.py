"""Every request that has not ended, wherever it waits or runs, and its one end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from pippin.backends.base import Admit, StepPlan, StepResult
from pippin.errors import OutOfMemory, PippinError
from pippin.messages import TokenDelta
from pippin.metrics import EngineMetrics, StepRecord
from pippin.scheduler.admission import Admission
from pippin.scheduler.memory import Claims
from pippin.scheduler.replies import (
    Compiling,
    Followed,
    Following,
    append_forced,
    append_tokens,
    client_error,
)
from pippin.scheduler.request import Quality, Request, RunningSlot, Stage
from pippin.scheduler.traffic import Traffic
from pippin.types import GRID, FinishReason, GrammarSpec, TokenLogprobs


class Observer(Protocol):
    """Called from the loop's thread, while the device works where that can be so. Never raises."""

    def request_changed(self, request: Request) -> None:
        """It arrived, or is in another phase."""
        ...

    def step_launched(self, plan: StepPlan, running_slots: Mapping[int, RunningSlot]) -> None:
        """`running_slots`: by slot, as of now."""
        ...

    def step_committed(self, plan: StepPlan, record: StepRecord) -> None: ...


class Outbox:
    def __init__(self) -> None:
        self._deltas: list[TokenDelta] = []

    def __len__(self) -> int:
        return len(self._deltas)

    def take(self) -> list[TokenDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def tokens(
        self,
        request: Request,
        slot: int,
        tokens: list[int],
        result: StepResult,
        finish: FinishReason | None,
    ) -> None:
        """Sampled tokens, and those that a grammar forces after them.

        The reply's first also says what the cache saved and scores the prompt.
        """
        scored = result.logprobs.get(slot)
        logprobs = None if scored is None else list(scored)
        if len(request.output) > len(tokens):
            self.end(request, finish, tokens, logprobs)
            return
        scores = result.prompt_logprobs.get(slot)
        prompt_logprobs = None if scores is None else list(scores)
        first = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        self._first(request, tokens=tokens, finish=finish, **first)

    def embedding(self, request: Request, vector: np.ndarray) -> None:
        """The reply to a request that embeds. `vector`: float32 [hidden]."""
        self._first(request, embedding=vector.tobytes(), finish="stop")

    def _first(self, request: Request, **fields: Any) -> None:
        self._deltas.append(
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

    def end(
        self,
        request: Request,
        finish: FinishReason | None,
        tokens: list[int] | None = None,
        logprobs: list[TokenLogprobs] | None = None,
    ) -> None:
        """More tokens of a reply, or its end; without `finish` more follow."""
        self._deltas.append(
            TokenDelta(
                request.id,
                tokens or [],
                logprobs,
                accepted_drafts=request.accepted_drafts,
                rejected_drafts=request.rejected_drafts,
                finish=finish,
            )
        )

    def error(self, request_id: str, error: Exception) -> None:
        code, status, param = "internal_error", 500, None
        if isinstance(error, PippinError):
            code, status, param = error.code, error.status, error.param
        self._deltas.append(
            TokenDelta(
                id=request_id,
                finish="error",
                error=str(error) or repr(error),
                error_code=code,
                error_status=status,
                error_param=param,
            )
        )


class Registry:
    def __init__(
        self,
        metrics: EngineMetrics,
        compiling: Compiling,
        following: Following,
        admission: Admission,
        traffic: Traffic,
        claims: Claims,
    ) -> None:
        self._metrics = metrics
        self._compiling = compiling
        self._following = following
        self._admission = admission
        self._traffic = traffic
        self._claims = claims
        self.requests: dict[str, Request] = {}
        self.running_slots: dict[int, RunningSlot] = {}  # by slot: in use, or not yet released
        self.leaving: list[RunningSlot] = []  # their requests have ended or are being preempted
        self.outbox = Outbox()
        self.observer: Observer | None = None  # None: events are not watched
        self.on_end: Callable[[Request], None] = lambda request: None

    @property
    def num_coming_tokens(self) -> int:
        """Of requests that will be in the queue when something is compiled or loaded for them."""
        compiling = self._compiling.num_tokens + self._following.num_coming_tokens
        return compiling + self._traffic.num_loading_tokens

    @property
    def running(self) -> list[RunningSlot]:
        return [running for running in self.running_slots.values() if running.runs]

    # ---- arrives, waits, runs --------------------------------------------------------------

    def refuse(self, request_id: str, error: Exception) -> None:
        self.outbox.error(request_id, error)
        self._metrics.requests_failed += 1

    def add(self, request: Request, spec: GrammarSpec | None) -> None:
        """Into the queue; where a grammar must be compiled first, when that is done."""
        self.requests[request.id] = request
        self._metrics.prompt_tokens += request.prompt_len
        if spec is None:
            self._admission.add(request)
        else:
            self._compiling.add(request, spec)
        self.notify(request)

    def take_compiled(self) -> None:
        """Into the queue with those whose grammars are there now."""
        for request in self._compiling.take_done(self.fail):
            if request.grammar is not None and request.grammar.slow:
                self._following.start(request)
            self._enqueue(request)

    def take_followed(self) -> None:
        """Those that run go on, those that wait for it get into the queue."""
        for request, future in self._following.take_done():
            try:
                self._take_forced(request, future.result())
            except Exception as error:  # whatever a grammar's library raises
                self.fail(request, client_error(error))
                continue
            if request.phase == "compiling":
                request.phase = "waiting"
                self._enqueue(request)

    def _take_forced(self, request: Request, followed: Followed) -> None:
        tokens, reason = append_forced(request, followed.forced)
        if reason is None and followed.finished:
            reason = "stop"
        request.mask = followed.mask
        self._metrics.generated_tokens += len(tokens)
        self._metrics.forced_tokens += len(tokens)
        if tokens or reason is not None:
            self.outbox.end(request, reason, tokens)
        if reason is not None:
            self._finish(request, reason)

    def _enqueue(self, request: Request) -> None:
        if request.followed:
            request.phase = "compiling"
        else:
            self._admission.add(request)
        self.notify(request)

    def count_started(self, admit: Sequence[Admit]) -> None:
        for request in (self.running_slots[started.slot].request for started in admit):
            if not request.num_preemptions and not request.starts_again:
                self._metrics.cached_tokens += request.cached_len
                self._metrics.host_tokens += request.host_len
                self._metrics.disk_tokens += request.disk_len
                self._metrics.peer_tokens += request.peer_len

    def preempt(self, running: RunningSlot) -> None:
        """Its slot is retired, and then its request queued again: `requeue`."""
        running.enter(Stage.PREEMPTING)
        self.leaving.append(running)

    def requeue(self, running: RunningSlot) -> None:
        request = running.request
        num_before = request.num_preemptions
        request.requeue(damaged=running.quality is Quality.DAMAGED)
        self._metrics.preemptions += request.num_preemptions - num_before
        self._enqueue(request)

    def take_tokens(self, request: Request, slot: int, result: StepResult) -> None:
        """What a step drew for it, and what its grammar forces after that; it may end with it."""
        if request.embeds:
            self.outbox.embedding(request, result.hidden[slot])
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
        self.outbox.tokens(request, slot, tokens, result, reason)
        self._metrics.generated_tokens += len(tokens)
        self._metrics.forced_tokens += len(tokens) - len(result.tokens[slot])
        if reason is not None:
            self._finish(request, reason)
        elif in_thread:
            self._following.start(request, result.tokens[slot])

    def notify(self, request: Request) -> None:
        if self.observer is not None:
            self.observer.request_changed(request)

    # ---- ends ------------------------------------------------------------------------------

    def abort(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is not None:  # else it ended by itself while the message was on its way
            self.outbox.end(request, "abort")
            self._end(request, "abort")
            self._metrics.requests_aborted += 1

    def finish(self, request_id: str) -> None:
        """The server saw a stop string: what has been generated so far is the reply."""
        request = self.requests.get(request_id)
        if request is not None:  # likewise
            self.outbox.end(request, "stop")
            self._finish(request, "stop")

    def taint(self, running: RunningSlot, error: Exception) -> None:
        """Nothing that its row holds, or will hold, is to be used: its request fails."""
        running.worsen(Quality.TAINTED)
        if running.runs:
            self.fail(running.request, error)

    def fail(self, request: Request, error: Exception) -> None:
        self.outbox.error(request.id, error)
        self._end(request, "error")
        self._metrics.requests_failed += 1

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._end(request, reason)
        self._metrics.requests_finished += 1

    def _end(self, request: Request, reason: FinishReason) -> None:
        self._following.remove(request)
        if request.phase == "compiling":
            self._compiling.remove(request)
        elif request.phase == "loading":
            self._traffic.remove(request)
        elif request.phase == "waiting":
            self._admission.remove(request)
        elif not (running := self.running_slots[request.slot]).preempting:
            self.leaving.append(running)
        request.end(reason)
        if request.grammar is not None and self._compiling.compiler is not None:
            self._compiling.compiler.trim()  # a grammar that has grown with the reply is forgotten
        if self._traffic.pushes is not None and request.handover:
            why = "" if request.completed else f"the request ended: {request.finish}"
            self._traffic.pushes.end(request, why)
        del self.requests[request.id]
        self.on_end(request)
        self.notify(request)

    # ---- bytes are short -------------------------------------------------------------------

    def make_room(self, starved: Sequence[RunningSlot], *, in_flight: bool) -> None:
        """Give up checkpoints, loads and hand-overs, then preempt requests.

        Those starved go on in a later plan. Where nothing can be given up and no step is
        `in_flight` that releases bytes, one request is larger than the budget.
        """

        def shortage() -> int:
            return self._claims.shortage(starved, self.running_slots.values())

        self._traffic.give_up(shortage)
        if (nbytes := shortage()) <= 0:
            return
        for running in requests_to_preempt(self.running, nbytes):
            self.preempt(running)
        if len(self.running_slots) == 1 and not in_flight:
            self._start_over(starved[0])

    def _start_over(self, running: RunningSlot) -> None:
        """Alone, and out of bytes. What it borrowed from the tree comes with a state and more that
        a row of its own does without: then it is preempted; or else it is too large."""
        claims, length = self._claims, running.row_len + 1
        fits = claims.costs.row_bytes(length) <= claims.budget.capacity
        if running.lock is None or not fits:
            self.fail_large(running.request, length - 1, claims.row_bytes(running, length))
        elif not running.preempting:
            self.preempt(running)

    def fail_large(self, request: Request, num_tokens: int, need: int) -> None:
        """It has outgrown the whole budget."""
        message = (
            f"the request reached {num_tokens:,} tokens and needs {need:,} bytes, "
            f"the budget holds {self._claims.budget.capacity:,}"
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
