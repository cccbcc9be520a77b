"""Records steps and requests while there are sinks for them.

    scheduler, loop ── observer ──▶ Recorder ── StepEvent, RequestEvent ──▶ sinks: sender, trace

Without a sink the scheduler has no observer: nothing here runs. A sink that raises is removed, and
the engine goes on.
"""

from __future__ import annotations

import functools
import heapq
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter, time
from typing import Any, Literal, Protocol, TypeVar, cast

from pippin.backends.base import StepPlan
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tree.components import COMPONENTS
from pippin.cache.tree.payload_tree import TreeObserver
from pippin.cache.tree.radix import Node
from pippin.engine.events.schema import (
    Change,
    NodeEvent,
    RequestEvent,
    StepChunk,
    StepEvent,
    TreeEvent,
)
from pippin.metrics import StepRecord
from pippin.scheduler.request import Request, RunningSlot
from pippin.scheduler.scheduler import Scheduler

_Event = TypeVar("_Event")
_Method = TypeVar("_Method", bound=Callable[..., None])


def never_raises(method: _Method) -> _Method:
    """For methods that the engine calls while it plans and commits: `give_up` is called instead."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as error:
            self.give_up(error)

    return cast(_Method, guarded)


logger = logging.getLogger(__name__)


class EventSink(Protocol):
    def step(self, step: StepEvent) -> None:
        """One that was committed."""
        ...

    def request(self, request: RequestEvent) -> None:
        """One that arrived, or is in another phase."""
        ...

    def lost(self) -> None:
        """It raised, or an event could not be recorded: it gets no more."""
        ...


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
    """The scheduler's observer. Its times start with itself."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = perf_counter) -> None:
        """`clock`: that of the loop."""
        self._scheduler = scheduler
        self._clock = clock
        self.zero = clock()  # 0 s of all events
        self.began = time()  # Unix time at 0 s
        self._sinks: list[EventSink] = []
        self._lives: dict[str, _Life] = {}
        self._launched: dict[int, _LaunchedStep] = {}
        self._preempted: list[str] = []  # since the last launch
        self._last: StepRecord | None = None

    @property
    def now(self) -> float:
        return self._since_zero(self._clock())

    def add(self, sink: EventSink) -> None:
        if not self._sinks:
            for request in self._scheduler.requests.values():
                self._lives[request.id] = self._life(request)
            self._scheduler.observer = self
        self._sinks.append(sink)

    def remove(self, sink: EventSink) -> None:
        self._sinks.remove(sink)
        if not self._sinks:
            self._scheduler.observer = None
            self._lives.clear()
            self._launched.clear()
            self._preempted.clear()
            self._last = None

    def lose(self, sink: EventSink, error: Exception) -> None:
        """Remove one sink that failed, or that an event could not be recorded for."""
        logger.error("%s failed and gets no more events", type(sink).__name__, exc_info=error)
        self._scheduler.metrics.watch_failures += 1
        if sink in self._sinks:
            self.remove(sink)
        sink.lost()

    def give_up(self, error: Exception) -> None:
        """No event could be made."""
        for sink in list(self._sinks):
            self.lose(sink, error)

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
        self._send_request(life)

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
                self._send_request(life)

    @never_raises
    def step_committed(self, plan: StepPlan, record: StepRecord) -> None:
        for step in [step for step in self._launched if step < plan.step]:
            del self._launched[step]  # it failed
        launched = self._launched.pop(plan.step, None)
        if launched is None:
            return  # launched before there was a sink
        event = self._step_event(plan, record, launched)
        self._last = record
        for sink in list(self._sinks):
            self._send(sink, sink.step, event)
        for id in launched.samples:
            if (life := self._lives.get(id)) is not None and life.first_token is None:
                life.first_token = event.resumed
                self._send_request(life)

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

    def _send_request(self, life: _Life) -> None:
        event = self._request_event(life)
        for sink in list(self._sinks):
            self._send(sink, sink.request, event)

    def _send(self, sink: EventSink, call: Callable[[_Event], None], event: _Event) -> None:
        try:
            call(event)
        except Exception as error:
            self.lose(sink, error)

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
        return round(seconds - self.zero, 6)


MAX_NODES = 512
NUM_KEPT = MAX_NODES * 3 // 4  # when there are more than that


class TreeMirror(TreeObserver):
    """An observer of the cache from its making until `close`."""

    def __init__(
        self,
        cache: PrefixCache,
        on_failure: Callable[[Exception], None],
        tier_below: Literal["host", "disk"] = "disk",
    ) -> None:
        """`tier_below`: the tier whose copies the cache marks."""
        self._cache = cache
        self._tier_below = tier_below
        self.give_up = on_failure
        self.shown = {node.id: node for node in _used_last(cache.radix.root)}  # that watchers know
        self._changes: dict[int, Change] = {}
        self._evicted: list[int] = []
        self._used: dict[int, None] = {}  # in order
        self._locked: list[int] = []
        cache.observers += (self,)

    def close(self) -> None:
        tree = self._cache
        tree.observers = tuple(one for one in tree.observers if one is not self)

    def snapshot(self) -> TreeEvent:
        """All nodes that watchers should know, after `changes` has returned what was new."""
        nodes = sorted(self.shown.values(), key=lambda node: node.start)
        return self._event([self._view(node, "show") for node in nodes], [], [], [])

    def changes(self) -> TreeEvent | None:
        """What is new since the last call, if anything is."""
        hidden = self._hide() if len(self.shown) > MAX_NODES else []
        locked = sorted(node.id for node in self._cache.locked_ends if node.id in self.shown)
        nothing_new = not (self._changes or self._evicted or hidden or self._used)
        if nothing_new and locked == self._locked:
            return None
        nodes = sorted((self.shown[id] for id in self._changes), key=lambda node: node.start)
        changed = [self._view(node, self._changes[node.id]) for node in nodes]
        used = [id for id in self._used if id in self.shown]
        tree = self._event(changed, self._evicted, hidden, used)
        self._changes, self._evicted, self._used = {}, [], {}
        self._locked = locked
        return tree

    # ---- the cache's observer ------------------------------------------------------------------

    @never_raises
    def added(self, node: Node) -> None:
        self._show(node, "add")
        assert node.parent is not None
        self._show_path(node.parent)
        self.changed(node.parent)

    @never_raises
    def split(self, upper: Node, lower: Node) -> None:
        if lower.id in self.shown:
            self._show(upper, "split")
            self.changed(lower)

    @never_raises
    def changed(self, node: Node) -> None:
        if node.id in self.shown:
            self._changes.setdefault(node.id, "change")

    @never_raises
    def removed(self, leaf: Node, parent: Node) -> None:
        if self._forget(leaf.id):
            self._evicted.append(leaf.id)
        self._used.pop(leaf.id, None)
        self.changed(parent)

    @never_raises
    def used(self, node: Node) -> None:
        self._show_path(node)
        self._used.pop(node.id, None)
        self._used[node.id] = None

    # --------------------------------------------------------------------------------------------

    def _show(self, node: Node, why: Change) -> None:
        self.shown[node.id] = node
        self._changes[node.id] = why

    def _show_path(self, node: Node) -> None:
        for above in node.ancestors():
            if above.id in self.shown:
                break  # and so is all above it
            self._show(above, "show")

    def _forget(self, id: int) -> bool:
        """Whether watchers knew it."""
        if self.shown.pop(id, None) is None:
            return False
        return self._changes.pop(id, "change") == "change"

    def _hide(self) -> list[int]:
        """Remove the least recently used ones."""
        kept = {node.id for node in _used_last(self._cache.radix.root, NUM_KEPT)}
        return [id for id in list(self.shown) if id not in kept and self._forget(id)]

    def _event(
        self, nodes: list[NodeEvent], evicted: list[int], hidden: list[int], used: list[int]
    ) -> TreeEvent:
        cache = self._cache
        return TreeEvent(
            nodes=nodes,
            evicted=evicted,
            hidden=hidden,
            used=used,
            locked=sorted(node.id for node in cache.locked_ends if node.id in self.shown),
            tick=cache.tick,
            num_nodes=cache.radix.num_nodes,
            num_tokens=cache.radix.num_tokens,
            num_roots=len(cache.radix.root.children),
        )

    def _view(self, node: Node, why: Change) -> NodeEvent:
        held = zip(COMPONENTS, node.payloads, strict=True)
        return NodeEvent(
            id=node.id,
            parent=0 if node.parent is None else node.parent.id,
            start=node.start,
            tokens=node.num_tokens,
            children=len(node.children),
            bytes={kind.value: payload.nbytes for kind, payload in held if payload is not None},
            tier=self._tier_below if _is_copied(node) else "device",
            hits=node.hits,
            used=node.stamp[1],
            change=why,
        )


def _used_last(root: Node, limit: int = MAX_NODES) -> list[Node]:
    """Parents before children; a parent was used whenever its child was."""
    found: list[Node] = []
    heap = [(-node.stamp[1], node.id, node) for node in root.children.values()]
    heapq.heapify(heap)
    while heap and len(found) < limit:
        node = heapq.heappop(heap)[2]
        found.append(node)
        for child in node.children.values():
            heapq.heappush(heap, (-child.stamp[1], child.id, child))
    return found


def _is_copied(node: Node) -> bool:
    """Whether the tier below has a copy of all its payloads."""
    held = [index for index, payload in enumerate(node.payloads) if payload is not None]
    return bool(held) and all(node.copied >> index & 1 for index in held)
