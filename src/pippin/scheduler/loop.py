"""The overlap loop: plan and launch the next step, then commit the last one while the device works.

          step N   |■■■■ device ■■■■|
        step N+1           |■■■■ device ■■■■|
            host   plan N+1, launch | wait N, commit N | plan N+2, launch | ...

What prompts need in N+1 may be dispatched after N's tokens were sent to their clients: to dispatch
much takes as long as most of it takes the device.
Without overlap the same code commits a step before it plans the next: one step in flight. So does
the overlap loop where that costs next to nothing: after a step without a forward, whose tokens or
spilled bytes are there, and after a long one of prompts alone, so that what arrives meanwhile is in
the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter, process_time
from typing import Any

from pippin.backends.base import Backend, DecodeRow, PendingStep, StepPlan, StepResult
from pippin.backends.warm_up import WarmUp
from pippin.decode.compile import Grammar
from pippin.errors import DeviceFailed, Overloaded, PippinError
from pippin.messages import Submit, TokenDelta
from pippin.metrics import NOTICEABLE_SECONDS, StepRecord
from pippin.scheduler.pace import StepTimes
from pippin.scheduler.request import FLUSH_SECONDS
from pippin.scheduler.scheduler import Scheduler


def _dispatch(launched: Launched) -> None:
    launched.pending.dispatch()


@dataclass(frozen=True)
class Launched:
    plan: StepPlan
    pending: PendingStep
    planned_at: float
    launched_at: float
    after_pause: bool  # the engine had nothing to do before it

    def record(
        self, result: StepResult, *, waited: float, resumed: float, committed: float, ghosts: int
    ) -> StepRecord:
        plan = self.plan
        # A host that did not wait was late: the device may have been done as early as the end of
        # the launch. So idle time is never counted too small.
        done = resumed if waited > NOTICEABLE_SECONDS else self.launched_at
        own_drafts, drafts_left, verified = 0, 0, []
        for row in plan.rows:
            drafts_left += row.num_drafts
            if isinstance(row, DecodeRow) and row.depth:
                own_drafts += row.depth if row.drafted else 0
                verified.append((row.slot, row.depth, len(result.tokens[row.slot]) - 1))
        return StepRecord(
            step=plan.step,
            planned=self.planned_at,
            dispatched=result.dispatched,
            launched=self.launched_at,
            device_done=done,
            resumed=resumed,
            committed=committed,
            waited=waited,
            prefill_tokens=plan.num_prefill_tokens if plan.prefill else 0,
            decode_rows=len(plan.decode),
            ghosts=ghosts,
            forwards=result.forwards,
            after_pause=self.after_pause,
            drafts=sum([depth for _, depth, _ in verified]) if verified else 0,
            accepted=sum([accepted for *_, accepted in verified]) if verified else 0,
            own_drafts=own_drafts,
            drafts_left=drafts_left,
            verified=tuple(verified),
        )


LONG_STEP_SECONDS = 0.05  # a step of prompts alone that is longer than this, if none is sent on,
LONG_STEP_FACTOR = 30  # and than so many times what the host does in between, hides little of it
COMPILING_SECONDS = 0.01  # to wait for a grammar at a time, where nothing else is to be done
MAX_FAILED_STEPS = 3  # in a row: then the device counts as dead

logger = logging.getLogger(__name__)


class Loop:
    def __init__(self, scheduler: Scheduler, backend: Backend, *, overlap: bool = True) -> None:
        self.scheduler = scheduler
        self.backend = backend
        self.overlap = overlap
        self._in_flight: Launched | None = None
        self._step_times = StepTimes()
        self._paused = True
        self._num_failed = 0  # steps, since one succeeded
        self._last_error: Exception | None = None
        self._flushes: list[Callable[[], None]] = []  # called when all that was flushed is freed
        self.failure: PippinError | None = None  # why no step will be run any more
        self.on_start: Callable[[list[str]], None] = lambda ids: None  # called before a launch
        self.warm_up = WarmUp(
            backend,
            lambda nbytes: nbytes <= scheduler.budget.free,
            scheduler.traffic.warm_ups(backend),
        )

    # ---- a step ----------------------------------------------------------------------------

    def step(self) -> list[TokenDelta]:
        """Launch one step and commit one; returns what clients are owed. Blocks at most once.

        When several steps in a row have failed, every request has ended with an error, `failure` is
        the reason, and further calls do nothing.
        """
        if self.failure is not None:
            return []
        if self._paused:
            self.backend.make_way(busy=True)
        previous = self._in_flight
        if previous is not None and not self._runs(previous, _dispatch):
            self._in_flight = previous = None
        if self.scheduler.traffic.flushing or self._flushes:
            self._free_flushed()
        launched = None if self._comes_first(previous) else self._plan_and_launch()
        if previous is not None and self._in_flight is previous:
            self._in_flight = None
            self._commit(previous)
        masked = launched is not None and launched.plan.masked_rows
        if launched is not None and (not masked or self._runs(launched, self._sample)):
            if self.overlap:
                self._in_flight = launched
            else:
                self._commit(launched)
        if previous is None and launched is None and not self._flushes:
            # A grammar is compiled, or something is loaded.
            self.scheduler.grammars.wait(COMPILING_SECONDS)
            self.scheduler.traffic.wait(COMPILING_SECONDS)
        if self._num_failed >= MAX_FAILED_STEPS:
            self._give_up()
        deltas = self.scheduler.take_outbox()
        if self._in_flight is None:
            self._rest_if_idle()
        else:
            self._paused = False
        return deltas

    def _runs(self, launched: Launched, verb: Callable[[Launched], None]) -> bool:
        """Whether a call of a step in flight succeeds; else the step fails."""
        try:
            verb(launched)
        except Exception as error:
            self._fail(launched.plan, error, launched.pending)
            return False
        return True

    def _comes_first(self, launched: Launched | None) -> bool:
        if launched is None or launched.plan.decode:
            return False
        if launched.plan.samples_at_once or launched.plan.spills_alone:
            return True
        metrics, pace = self.scheduler.metrics, self.scheduler.pace
        host_seconds = metrics.records[-1].plan_seconds if metrics.records else 0.0
        seconds = pace.costs.prefill_seconds(launched.plan.num_prefill_tokens)
        pushes = self.scheduler.pushes
        least = 0.0 if pushes is not None and pushes.busy else LONG_STEP_SECONDS
        return seconds > max(least, LONG_STEP_FACTOR * host_seconds)

    def _plan_and_launch(self) -> Launched | None:
        planned_at = perf_counter()
        plan = self.scheduler.plan()
        if plan is None:
            return None
        if plan.admit:
            started = [self.scheduler.running_slots[admit.slot].request for admit in plan.admit]
            for request in started:
                if request.submitted_s is not None and request.queued_s is None:
                    request.queued_s = planned_at - request.submitted_s
            self.on_start([request.id for request in started])
        try:
            pending = self.backend.launch(plan)
        except Exception as error:
            if self._in_flight is not None:  # steps end in order
                self._commit(self._in_flight)
                self._in_flight = None
            self._fail(plan, error)
            return None
        launched = Launched(plan, pending, planned_at, perf_counter(), self._paused)
        if self.scheduler.observer is not None:
            self.scheduler.observer.step_launched(plan, self.scheduler.running_slots)
        return launched

    def _sample(self, launched: Launched) -> None:
        """Grammar rows: their masks need the tokens just committed."""
        launched.pending.sample(self.scheduler.masks(launched.plan))

    def _commit(self, launched: Launched) -> None:
        plan = launched.plan
        began = perf_counter()
        try:
            result = launched.pending.wait()
        except Exception as error:
            self._fail(plan, error, launched.pending)
            return
        self._num_failed = 0
        resumed = perf_counter()
        ghosts = self.scheduler.commit(plan.step, result)
        record = launched.record(
            result, waited=resumed - began, resumed=resumed, committed=perf_counter(), ghosts=ghosts
        )
        self.scheduler.metrics.add(record)
        timed = self._step_times.add(record)
        if timed is not None:
            self.scheduler.observe(timed)
        if self.scheduler.observer is not None:
            self.scheduler.observer.step_committed(plan, record)

    def _fail(self, plan: StepPlan, error: Exception, pending: PendingStep | None = None) -> None:
        logger.error("step %d failed", plan.step, exc_info=error)
        lost = isinstance(error, DeviceFailed)  # as the backend says itself
        self._num_failed = MAX_FAILED_STEPS if lost else self._num_failed + 1
        self._last_error = error
        if pending is not None:
            pending.discard()
        self.scheduler.fail_step(plan.step, error)

    def _give_up(self) -> None:
        """The device is dead: nothing more is launched, and every request ends with an error."""
        error = self._last_error
        cause = f"the device failed {self._num_failed} steps in a row: {str(error) or repr(error)}"
        self.failure = error if isinstance(error, DeviceFailed) else DeviceFailed(cause)
        if self._in_flight is not None:
            self._in_flight.pending.discard()
            self._in_flight = None
        self.scheduler.fail_all(self.failure)

    def _rest_if_idle(self) -> None:
        self._paused = self.idle
        if self._paused:
            self.backend.make_way(busy=False)

    # ---- requests --------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        if self.failure is not None:
            return True
        return self._in_flight is None and not self.scheduler.has_work and not self._flushes

    def has_room(self, submit: Submit) -> bool:
        """Whether the queue has room for it now; what can never run has, and ends with an error."""
        try:
            self.scheduler.check(submit)
        except PippinError as error:
            return not isinstance(error, Overloaded)
        return True

    def submit(self, submit: Submit, grammar: Grammar | None = None) -> None:
        if self.failure is not None:
            raise self.failure
        self.scheduler.add(submit, grammar, perf_counter())

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def finish(self, request_id: str) -> None:
        self.scheduler.finish(request_id)

    # ---- the engine ------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        cache = self.scheduler.cache
        return self.counters() | {"cache": cache.report() if cache is not None else None}

    def counters(self) -> dict[str, Any]:
        """Its numbers alone: nothing in it takes longer the more is cached."""
        scheduler = self.scheduler
        cache, tiers = scheduler.cache, scheduler.traffic.counters()
        return {
            "running": len(scheduler.running),
            "waiting": scheduler.num_waiting,
            "slots": scheduler.slots.num_slots,
            "slots_reason": scheduler.limits.max_running_reason,
            "overlap": self.overlap,
            "fallbacks": [str(fallback) for fallback in self.backend.fallbacks],
            "cpu_seconds": process_time(),
            "memory": {
                "device_bytes": self.backend.memory_used(),
                "parts": self.backend.memory_parts(),
                "device_buffers": self.backend.buffers_used(),
                "max_device_buffers": self.backend.device.max_buffers,
                "budget_bytes": scheduler.budget.capacity,
                "claimed_bytes": scheduler.budget.claimed,
                "available_bytes": scheduler.budget.available,
            },
            "metrics": scheduler.metrics.summary(),
            "cache": cache.counters() if cache is not None else None,
            "host": tiers.get("host"),
            "disk": tiers.get("disk"),
            "peer": tiers.get("peer"),
            "pushes": None if scheduler.pushes is None else asdict(scheduler.pushes.stats),
        }

    def flush_cache(self, on_freed: Callable[[dict[str, Any]], None] = lambda answer: None) -> None:
        """Drop what no running request needs: no match returns it from now on, and steps free some
        of it each. `on_freed` is called with the bytes when the last is freed."""
        cache = self.scheduler.cache
        if cache is None:
            on_freed({"freed_bytes": 0, "kept_bytes": 0})
            return
        freed = self.scheduler.traffic.flush()
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.flush()
        answer = {
            "freed_bytes": cache.evictable_bytes,
            "kept_bytes": cache.nbytes - cache.evictable_bytes,
            "freed_host_bytes": freed.get("host", 0),
            "freed_disk_bytes": freed.get("disk", 0),
        }
        self._flushes.append(partial(on_freed, answer))
        self._free_flushed()

    def _free_flushed(self) -> None:
        traffic = self.scheduler.traffic
        if traffic.flushing:
            traffic.free_flushed()
        if not traffic.flushing:
            flushes, self._flushes = self._flushes, []
            for end in flushes:
                end()

    def close(self) -> None:
        """What is in flight ends first: a process must not exit while its device computes."""
        if self._in_flight is not None:
            self._commit(self._in_flight)
            self._in_flight = None
        while self.scheduler.traffic.flushing:
            self._free_flushed()
        if self.failure is None:
            self._write_behind()
        self.scheduler.traffic.close()
        self.scheduler.grammars.close()
        self.backend.close()
        if self.scheduler.compiler is not None:
            self.scheduler.compiler.close()

    def _write_behind(self) -> None:
        traffic = self.scheduler.traffic
        for tier in traffic.tiers:
            tier.loads.give_up(0)
        deadline = perf_counter() + FLUSH_SECONDS
        while traffic.hurry() and perf_counter() < deadline:
            plan = self.scheduler.plan_spill()
            if plan is None:
                traffic.wait(COMPILING_SECONDS)
                continue
            pending: PendingStep | None = None
            try:
                pending = self.backend.launch(plan)
                result = pending.wait()
            except Exception as error:
                self._fail(plan, error, pending)
                return
            self.scheduler.commit(plan.step, result)
