"""Gathers an engine's events and sends them, at most ten times a second.

watch     the next message is a snapshot, for watchers that are new
flush     called after every step: sends what is new, if the last message was long enough ago
unwatch   from now on nothing is gathered

If any of it raises, it sends a message that says so and nothing more, and the engine goes on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from pippin.cache.tiers.cache_tier import HOST
from pippin.engine.events.recorder import Recorder, TreeMirror, never_raises
from pippin.engine.events.schema import (
    EngineLoad,
    Frame,
    MemoryUse,
    RequestEvent,
    SlotProgress,
    Snapshot,
    StepEvent,
)
from pippin.messages import FeedMessage
from pippin.scheduler.loop import Loop

INTERVAL_SECONDS = 0.1
MAX_STEPS = 100  # of a message
MAX_ROWS = 4000  # in these steps together, where a chunk counts as CHUNK_ROWS
CHUNK_ROWS = 20
MAX_REQUESTS = 100  # of a message
NUM_PAST_REQUESTS = 30  # of a snapshot, beside these
MAX_NODE_TOKENS = 4096  # of an answer

Send = Callable[[FeedMessage], None]


class EventSender:
    """The events of one engine; a sink of the recorder."""

    def __init__(self, loop: Loop, recorder: Recorder, send: Send) -> None:
        self._loop = loop
        self._recorder = recorder
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
            self._recorder.add(self)
            self._last_generated = self._loop.scheduler.metrics.generated_tokens
            scheduler = self._loop.scheduler
            on_host = any(tiers.kind is HOST for tiers, _ in scheduler.tiers)
            if scheduler.cache is not None:
                tree = TreeMirror(scheduler.cache, self.give_up, "host" if on_host else "disk")
                self._mirror = tree
        self.flush()

    def unwatch(self) -> None:
        if not self.watched:
            return
        self._recorder.remove(self)
        self._forget()

    def give_up(self, error: Exception) -> None:
        if not self._is_lost:  # else by an earlier failure of the same call
            self._recorder.lose(self, error)

    def lost(self) -> None:
        """Nothing is sent any more: what was gathered may be wrong."""
        self._is_lost = True
        self._forget()
        self._send_lost()

    def _send_lost(self) -> None:
        self._send(FeedMessage("lost", b""))

    def _forget(self) -> None:
        self.watched = self._snapshot_wanted = False
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

    # ---- the recorder's sink -----------------------------------------------------------------

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
            compiling=len(scheduler.compiling),
            loading=scheduler.traffic.num_loading,
            prompt_tokens=metrics.prompt_tokens,
            cached_tokens=metrics.cached_tokens,
            computed_tokens=metrics.computed_tokens,
            generated_tokens=metrics.generated_tokens,
            finished=metrics.requests_finished,
            aborted=metrics.requests_aborted,
            failed=metrics.requests_failed,
            preemptions=metrics.preemptions,
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
