"""Makes records of steps and requests while somebody wants them. Knows no tree and no messages.

    scheduler, loop  ── observer ──▶  Recorder  ── Step, Request ──▶  sinks: the feed, a trace

Without a sink the scheduler has no observer: nothing here runs. A sink that raises is lost, and the
engine goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter, time
from typing import Protocol

from pippin.backends.base import StepPlan
from pippin.engine.events.guard import never_raises
from pippin.engine.events.schema import Request, Step, StepChunk
from pippin.metrics import StepRecord
from pippin.scheduler import request as scheduled
from pippin.scheduler.running_slot import RunningSlot
from pippin.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Sink(Protocol):
    def step(self, step: Step) -> None:
        """One that was committed."""
        ...

    def request(self, request: Request) -> None:
        """One that came, or is in another phase."""
        ...

    def lost(self) -> None:
        """It raised, or could not be told: it hears nothing more."""
        ...


@dataclass
class _Life:
    """What a request does not know of itself, on the recorder's clock."""

    request: scheduled.Request
    came: float
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    retractions: int = 0  # that were told


@dataclass(frozen=True)
class _LaunchedStep:
    """Who had which slot when a step was launched: slots change hands before it is committed."""

    chunks: list[StepChunk]
    started: list[str]
    samples: list[str]  # requests that get their first token, or the next after a retraction
    retracted: list[str]


class Recorder:
    """The scheduler's observer. Times that it tells began with itself."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = perf_counter) -> None:
        """`clock`: that of the loop."""
        self._scheduler = scheduler
        self._clock = clock
        self.zero = clock()  # 0 s of what is told
        self.began = time()  # Unix time at 0 s
        self._sinks: list[Sink] = []
        self._lives: dict[str, _Life] = {}
        self._launched: dict[int, _LaunchedStep] = {}
        self._retracted: list[str] = []  # since the last launch
        self._last: StepRecord | None = None

    @property
    def now(self) -> float:
        return self._told(self._clock())

    def add(self, sink: Sink) -> None:
        """Tell it everything from now on."""
        if not self._sinks:
            for request in self._scheduler.requests.values():
                self._lives[request.id] = self._life(request)
            self._scheduler.registry.observer = self
        self._sinks.append(sink)

    def remove(self, sink: Sink) -> None:
        self._sinks.remove(sink)
        if not self._sinks:
            self._scheduler.registry.observer = None
            self._lives.clear()
            self._launched.clear()
            self._retracted.clear()
            self._last = None

    def lose(self, sink: Sink, error: Exception) -> None:
        """A sink's own failure, or ours to tell it something: nobody else is harmed."""
        name = type(sink).__name__
        logger.error("%s failed: what the engine does is not told to it", name, exc_info=error)
        self._scheduler.metrics.watch_failures += 1
        if sink in self._sinks:
            self.remove(sink)
        sink.lost()

    def give_up(self, error: Exception) -> None:
        """No record could be made."""
        for sink in list(self._sinks):
            self.lose(sink, error)

    def requests(self) -> list[Request]:
        """All that have not ended: those that run first, then in order of arrival."""
        lives = sorted(self._lives.values(), key=lambda life: (not life.request.running, life.came))
        return [self._view(life) for life in lives]

    # ---- what the scheduler tells ------------------------------------------------------------

    @never_raises
    def request_changed(self, request: scheduled.Request) -> None:
        life = self._lives.get(request.id)
        if life is None:
            life = self._lives[request.id] = self._life(request)
        if request.num_preemptions > life.retractions:
            life.retractions = request.num_preemptions
            self._retracted.append(request.id)
        if request.finish is not None:
            life.ended = self.now
            del self._lives[request.id]
        self._tell(life)

    @never_raises
    def step_launched(self, plan: StepPlan, running_slots: Mapping[int, RunningSlot]) -> None:
        started = [running_slots[admit.slot].request.id for admit in plan.admit]
        samples = [running_slots[row.slot].request.id for row in plan.prefill if row.samples]
        chunks = [
            StepChunk(
                request=running_slots[row.slot].request.id,
                slot=row.slot,
                start=row.start,
                tokens=len(row.tokens),
                restored=0 if row.restore is None else row.restore.length,
                samples=row.samples,
                checkpoints=len(row.checkpoints) if row.captures else 0,
            )
            for row in plan.prefill
        ]
        retracted, self._retracted = self._retracted, []
        self._launched[plan.step] = _LaunchedStep(chunks, started, samples, retracted)
        for id in started:
            if (life := self._lives.get(id)) is not None:
                if life.started is None:
                    life.started = round(life.came + (life.request.queued_s or 0.0), 6)
                self._tell(life)

    @never_raises
    def step_committed(self, plan: StepPlan, record: StepRecord) -> None:
        for step in [step for step in self._launched if step < plan.step]:
            del self._launched[step]  # it failed
        launched = self._launched.pop(plan.step, None)
        if launched is None:
            return  # launched before anybody watched
        told = self._step(plan, record, launched)
        self._last = record
        self._tell_sinks(lambda sink: sink.step(told))
        for id in launched.samples:
            if (life := self._lives.get(id)) is not None and life.first_token is None:
                life.first_token = told.resumed
                self._tell(life)

    # ---- records -----------------------------------------------------------------------------

    def _step(self, plan: StepPlan, record: StepRecord, launched: _LaunchedStep) -> Step:
        captures = [retire.captures for retire in plan.retire]
        captures += [row.captures for row in plan.prefill]
        captures += [row.checkpoint for row in plan.decode]
        idle = span = None
        last = self._last
        if last is not None and last.step + 1 == record.step and not record.after_pause:
            idle, span = record.idle_since(last)
        return Step(
            step=plan.step,
            planned=self._told(record.planned),
            dispatched=self._told(record.dispatched),
            launched=self._told(record.launched),
            done=self._told(record.device_done),
            resumed=self._told(record.resumed),
            committed=self._told(record.committed),
            waited=round(record.waited, 6),
            seen=record.host_waited,
            after_pause=record.after_pause,
            idle=None if idle is None else round(idle, 6),
            span=None if span is None else round(span, 6),
            chunks=launched.chunks,
            decode=[row.slot for row in plan.decode],
            ghosts=record.ghosts,
            started=launched.started,
            retracted=launched.retracted,
            retired=[retire.slot for retire in plan.retire],
            captures=sum(captures),
            loads=len(plan.load),
            spills=len(plan.spill),
            forwards=record.forwards,
        )

    def _life(self, request: scheduled.Request) -> _Life:
        came = self.now if request.submitted_s is None else self._told(request.submitted_s)
        life = _Life(request, came, retractions=request.num_preemptions)
        if request.queued_s is not None:
            life.started = round(came + request.queued_s, 6)
        return life

    def _tell(self, life: _Life) -> None:
        told = self._view(life)
        self._tell_sinks(lambda sink: sink.request(told))

    def _tell_sinks(self, tell: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                tell(sink)
            except Exception as error:
                self.lose(sink, error)

    def _view(self, life: _Life) -> Request:
        request = life.request
        running = self._scheduler.running_slots.get(request.slot) if request.slot else None
        phase = request.phase
        if phase == "decode" and not request.output:
            phase = "prefill"  # its last chunk is in flight
        return Request(
            id=request.id,
            phase=phase,
            slot=request.slot or None,
            prompt=request.prompt_len,
            cached=request.cached_len,
            host=request.host_len,
            disk=request.disk_len,
            held=0 if running is None else running.row_len,
            reply=len(request.output),
            max_tokens=request.params.max_tokens,
            priority=request.priority,
            retractions=request.num_preemptions,
            came=life.came,
            started=life.started,
            first_token=life.first_token,
            ended=life.ended,
            finish=request.finish,
        )

    def _told(self, seconds: float) -> float:
        """A time of `perf_counter` as it is told, to the microsecond."""
        return round(seconds - self.zero, 6)
