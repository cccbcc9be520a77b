"""Records steps and requests while there are watchers, and sends them ten times a second at most.

    scheduler, loop ── observer ──▶ Recorder ── StepEvent, RequestEvent ──▶ EventSender

watch     the next message is a snapshot, for watchers that are new
flush     called after every step: sends what is new, if the last message was long enough ago
unwatch   from now on nothing is gathered

If any of it raises, it sends a message that says so and nothing more, and the engine goes on.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter, time
from typing import Any

import msgspec

from pippin.backends.base import StepPlan
from pippin.cache.tiers.cache_tier import HOST
from pippin.engine.events.schema import (
    EngineLoad,
    Frame,
    MemoryUse,
    RequestEvent,
    SlotProgress,
    Snapshot,
    StepChunk,
    StepEvent,
)
from pippin.engine.events.tree_mirror import TreeMirror, never_raises
from pippin.messages import FeedMessage
from pippin.metrics import StepRecord
from pippin.scheduler.loop import Loop
from pippin.scheduler.request import Request, RunningSlot
from pippin.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


@dataclass
class _Life:
    """What a request does not record of itself, on the recorder's clock."""

    request: Request
    arrived: float
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None
    preemptions: int = 0  # that were recorded


@dataclass(frozen=True)
class _LaunchedStep:
    """The requests of a step at its launch: slots may have others when it is committed."""

    chunks: list[StepChunk]
    started: list[str]
    samples: list[str]  # requests that get their first token, or the next after a preemption
    preempted: list[str]


class Recorder:
    """The scheduler's observer from `start` to `stop`. Its times start with itself."""

    def __init__(
        self, scheduler: Scheduler, sender: EventSender, clock: Callable[[], float]
    ) -> None:
        """`clock`: that of the loop."""
        self._scheduler = scheduler
        self._sender = sender
        self._clock = clock
        self._zero = clock()  # 0 s of all events
        self.began = time()  # Unix time at 0 s
        self._lives: dict[str, _Life] = {}
        self._launched: dict[int, _LaunchedStep] = {}
        self._preempted: list[str] = []  # since the last launch
        self._last: StepRecord | None = None

    @property
    def now(self) -> float:
        return self._since_zero(self._clock())

    def start(self) -> None:
        for request in self._scheduler.requests.values():
            self._lives[request.id] = self._life(request)
        self._scheduler.observer = self

    def stop(self) -> None:
        self._scheduler.observer = None
        self._lives.clear()
        self._launched.clear()
        self._preempted.clear()
        self._last = None

    def give_up(self, error: Exception) -> None:
        self._sender.give_up(error)

    def requests(self) -> list[RequestEvent]:
        """All that have not ended: the running ones, then the others, in order of arrival."""
        lives = self._lives.values()
        order = sorted(lives, key=lambda life: (not life.request.running, life.arrived))
        return [self._request_event(life) for life in order]

    # ---- the scheduler's observer ------------------------------------------------------------

    @never_raises
    def request_changed(self, request: Request) -> None:
        life = self._lives.get(request.id)
        if life is None:
            life = self._lives[request.id] = self._life(request)
        if request.num_preemptions > life.preemptions:
            life.preemptions = request.num_preemptions
            self._preempted.append(request.id)
        if request.finish is not None:
            life.ended = self.now
            del self._lives[request.id]
        self._sender.request(self._request_event(life))

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
        preempted, self._preempted = self._preempted, []
        self._launched[plan.step] = _LaunchedStep(chunks, started, samples, preempted)
        for id in started:
            if (life := self._lives.get(id)) is not None:
                if life.started is None:
                    life.started = round(life.arrived + (life.request.queued_s or 0.0), 6)
                self._sender.request(self._request_event(life))

    @never_raises
    def step_committed(self, plan: StepPlan, record: StepRecord) -> None:
        for step in [step for step in self._launched if step < plan.step]:
            del self._launched[step]  # it failed
        launched = self._launched.pop(plan.step, None)
        if launched is None:
            return  # launched before there was a sink
        event = self._step_event(plan, record, launched)
        self._last = record
        self._sender.step(event)
        for id in launched.samples:
            if (life := self._lives.get(id)) is not None and life.first_token is None:
                life.first_token = event.resumed
                self._sender.request(self._request_event(life))

    # ---- records -----------------------------------------------------------------------------

    def _step_event(self, plan: StepPlan, record: StepRecord, launched: _LaunchedStep) -> StepEvent:
        captures = [retire.captures for retire in plan.retire]
        captures += [row.captures for row in plan.prefill]
        captures += [row.checkpoint for row in plan.decode]
        idle = span = None
        last = self._last
        if last is not None and last.step + 1 == record.step and not record.after_pause:
            idle, span = record.idle_since(last)
        return StepEvent(
            step=plan.step,
            planned=self._since_zero(record.planned),
            dispatched=self._since_zero(record.dispatched),
            launched=self._since_zero(record.launched),
            done=self._since_zero(record.device_done),
            resumed=self._since_zero(record.resumed),
            committed=self._since_zero(record.committed),
            waited=round(record.waited, 6),
            seen=record.host_waited,
            after_pause=record.after_pause,
            idle=None if idle is None else round(idle, 6),
            span=None if span is None else round(span, 6),
            chunks=launched.chunks,
            decode=[row.slot for row in plan.decode],
            drafts=list(record.verified),
            ghosts=record.ghosts,
            started=launched.started,
            preempted=launched.preempted,
            retired=[retire.slot for retire in plan.retire],
            captures=sum(captures),
            loads=len(plan.load),
            spills=len(plan.spill),
            forwards=record.forwards,
        )

    def _life(self, request: Request) -> _Life:
        submitted = request.submitted_s
        arrived = self.now if submitted is None else self._since_zero(submitted)
        life = _Life(request, arrived, preemptions=request.num_preemptions)
        if request.queued_s is not None:
            life.started = round(arrived + request.queued_s, 6)
        return life

    def _request_event(self, life: _Life) -> RequestEvent:
        request = life.request
        running = self._scheduler.running_slots.get(request.slot) if request.slot else None
        phase = request.phase
        if phase == "decode" and not request.output:
            phase = "prefill"  # its last chunk is in flight
        return RequestEvent(
            id=request.id,
            phase=phase,
            slot=request.slot or None,
            prompt=request.prompt_len,
            cached=request.cached_len,
            host=request.host_len,
            disk=request.disk_len,
            peer=request.peer_len,
            held=0 if running is None else running.row_len,
            reply=len(request.output),
            max_tokens=request.params.max_tokens,
            priority=request.priority,
            preemptions=request.num_preemptions,
            arrived=life.arrived,
            started=life.started,
            first_token=life.first_token,
            ended=life.ended,
            finish=request.finish,
        )

    def _since_zero(self, seconds: float) -> float:
        """To the microsecond."""
        return round(seconds - self._zero, 6)


INTERVAL_SECONDS = 0.1
MAX_STEPS = 100  # of a message
MAX_ROWS = 4000  # in these steps together, where a chunk counts as CHUNK_ROWS
CHUNK_ROWS = 20
MAX_REQUESTS = 100  # of a message
COUNTED = ("prompt_tokens", "cached_tokens", "computed_tokens", "generated_tokens", "preemptions")
NUM_PAST_REQUESTS = 30  # of a snapshot, beside these
MAX_NODE_TOKENS = 4096  # of an answer

Send = Callable[[FeedMessage], None]


class EventSender:
    def __init__(self, loop: Loop, send: Send, clock: Callable[[], float] = perf_counter) -> None:
        self._loop = loop
        self._recorder = Recorder(loop.scheduler, self, clock)
        self._send = send
        self._encoder = msgspec.json.Encoder()
        self.watched = False
        self._is_lost = False
        self._snapshot_wanted = False
        self._last_at = -math.inf
        self._last_generated = 0
        self._number = 0
        self._mirror: TreeMirror | None = None
        self._steps: deque[StepEvent] = deque(maxlen=MAX_STEPS)
        self._num_steps = 0  # since the last frame
        self._requests: dict[str, RequestEvent] = {}
        self._past_steps: deque[StepEvent] = deque(maxlen=MAX_STEPS)
        self._past_requests: deque[RequestEvent] = deque(maxlen=NUM_PAST_REQUESTS)

    # ---- watchers ----------------------------------------------------------------------------

    @never_raises
    def watch(self) -> None:
        """A watcher is new, or fell behind."""
        if self._is_lost:
            self._send_lost()
            return
        self._snapshot_wanted = True
        if not self.watched:
            self.watched = True
            self._recorder.start()
            self._last_generated = self._loop.scheduler.metrics.generated_tokens
            scheduler = self._loop.scheduler
            on_host = any(tiers.kind is HOST for tiers, _ in scheduler.tiers)
            if scheduler.cache is not None:
                tree = TreeMirror(scheduler.cache, self.give_up, "host" if on_host else "disk")
                self._mirror = tree
        self.flush()

    def unwatch(self) -> None:
        if self.watched:
            self._forget()

    def give_up(self, error: Exception) -> None:
        """Nothing is sent any more: what was gathered may be wrong."""
        if self._is_lost:  # by an earlier failure of the same call
            return
        logger.error("the event sender failed: watchers get no more events", exc_info=error)
        self._loop.scheduler.metrics.watch_failures += 1
        self._is_lost = True
        self._forget()
        self._send_lost()

    def _send_lost(self) -> None:
        self._send(FeedMessage("lost", b""))

    def _forget(self) -> None:
        self.watched = self._snapshot_wanted = False
        self._recorder.stop()
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None
        self._take_steps()
        self._requests.clear()
        self._past_steps.clear()
        self._past_requests.clear()

    @property
    def due_in(self) -> float:
        """Seconds until something is to be sent if nothing more happens; infinite if nothing is."""
        if not self.watched or not (self._snapshot_wanted or self._num_steps or self._requests):
            return math.inf
        return max(0.0, self._last_at + INTERVAL_SECONDS - self._recorder.now)

    @never_raises
    def flush(self) -> None:
        """Send what is new, unless it is too soon."""
        if not self.watched:
            return
        now = self._recorder.now
        if now - self._last_at < INTERVAL_SECONDS:
            return
        load = self._load(now)
        frame = self._frame(now, load)
        if frame is not None:
            self._last_at = now
            self._send(FeedMessage("frame", self._encoder.encode(frame)))
        if self._snapshot_wanted:
            self._last_at = now
            self._snapshot_wanted = False
            self._send(FeedMessage("snapshot", self._encoder.encode(self._snapshot(now, load))))

    def node(self, id: int) -> dict[str, Any]:
        """The first tokens of a node that watchers know; {} of another."""
        node = None if self._mirror is None else self._mirror.shown.get(id)
        if node is None:
            return {}
        return {
            "start": node.start,
            "num_tokens": node.num_tokens,
            "tokens": node.token_ids[:MAX_NODE_TOKENS].tolist(),
        }

    # ---- what the recorder calls --------------------------------------------------------------

    def step(self, step: StepEvent) -> None:
        self._steps.append(step)
        self._num_steps += 1
        self._past_steps.append(step)

    def request(self, request: RequestEvent) -> None:
        self._requests.pop(request.id, None)
        self._requests[request.id] = request
        if request.ended is not None:
            self._past_requests.append(request)

    # ---- messages ----------------------------------------------------------------------------

    def _frame(self, now: float, load: EngineLoad) -> Frame | None:
        """None: nothing is new."""
        tree = None if self._mirror is None else self._mirror.changes()
        if not (self._num_steps or self._requests or tree is not None):
            return None
        self._number += 1
        num_steps = self._num_steps
        steps = self._take_steps()
        requests, self._requests = list(self._requests.values()), {}
        running_slots = self._loop.scheduler.running_slots.values()
        return Frame(
            at=now,
            number=self._number,
            steps=steps,
            left_out=num_steps - len(steps),
            requests=requests[-MAX_REQUESTS:],
            progress=[
                SlotProgress(running.slot, running.row_len, len(running.request.output))
                for running in running_slots
                if running.runs
            ],
            tree=tree,
            memory=self._memory(),
            load=load,
        )

    def _snapshot(self, now: float, load: EngineLoad) -> Snapshot:
        loop = self._loop
        cache = loop.scheduler.cache
        return Snapshot(
            began=self._recorder.began,
            at=now,
            number=self._number,
            device=loop.backend.device.name,
            slots=loop.scheduler.slots.num_slots,
            overlap=loop.overlap,
            components=[] if cache is None else [kind.value for kind in cache.component_bytes],
            steps=_newest(self._past_steps),
            requests=[*self._past_requests, *self._recorder.requests()[:MAX_REQUESTS]],
            tree=None if self._mirror is None else self._mirror.snapshot(),
            memory=self._memory(),
            load=load,
        )

    def _take_steps(self) -> list[StepEvent]:
        steps = _newest(self._steps)
        self._steps.clear()
        self._num_steps = 0
        return steps

    def _memory(self) -> MemoryUse:
        scheduler = self._loop.scheduler
        budget, cache = scheduler.budget, scheduler.cache
        rows = sum(running.nbytes for running in scheduler.running_slots.values())
        checkpoints = sum(running.checkpoint_bytes for running in scheduler.running_slots.values())
        loads = scheduler.traffic.claimed_bytes
        tree = {} if cache is None else cache.component_bytes
        return MemoryUse(
            device=self._loop.backend.memory_used(),
            capacity=budget.capacity,
            rows=rows,
            checkpoints=checkpoints,
            captures=budget.claimed - rows - checkpoints - loads,
            loads=loads,
            tree={kind.value: nbytes for kind, nbytes in tree.items()},
            evictable=0 if cache is None else cache.evictable_bytes,
            free=budget.free,
        )

    def _load(self, now: float) -> EngineLoad:
        scheduler = self._loop.scheduler
        metrics = scheduler.metrics
        generated = metrics.generated_tokens - self._last_generated
        self._last_generated = metrics.generated_tokens
        began = self._steps[0].planned if self._steps else now
        seconds = now - max(began, self._last_at)
        return EngineLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.admission.queue),
            compiling=len(scheduler.grammars.coming),
            loading=len(scheduler.traffic.loading),
            **{name: getattr(metrics, name) for name in COUNTED},
            finished=metrics.requests_finished,
            aborted=metrics.requests_aborted,
            failed=metrics.requests_failed,
            tokens_per_second=round(generated / seconds, 1) if seconds else 0.0,
            idle_share=self._idle_share(),
            received=scheduler.traffic.num_received,
            sent=scheduler.traffic.num_sent,
        )

    def _idle_share(self) -> float | None:
        idle = sum(step.idle or 0.0 for step in self._steps)
        span = sum(step.span or 0.0 for step in self._steps)
        return round(min(max(0.0, idle / span), 1.0), 4) if span else None


def _newest(steps: deque[StepEvent]) -> list[StepEvent]:
    """Those that have room in a message, the oldest first."""
    found: list[StepEvent] = []
    room = MAX_ROWS
    for step in reversed(steps):
        room -= len(step.decode) + CHUNK_ROWS * len(step.chunks)
        if room < 0:
            break
        found.append(step)
    return found[::-1]
