"""The overlap loop: launch the next step, then commit the last one while the device works.

          step N   |■■■■ device ■■■■|
        step N+1           |■■■■ device ■■■■|
            host   plan N+1, launch | wait N, commit N | plan N+2, launch | ...

What prompts need in N+1 may be handed over after N's tokens have gone to their clients: to hand
over much takes as long as most of it takes the device.
Without overlap the same code commits a step before it plans the next: one step in flight. So does
the overlap loop where that costs next to nothing: after a step without a forward, whose tokens are
there, and after a long one of prompts alone, so that whoever comes meanwhile is in the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any

from pippin.backends.base import Backend, PendingStep, StepPlan
from pippin.backends.warm_up import WarmUp
from pippin.decode.grammar import Grammar
from pippin.errors import DeviceFailed, Overloaded, PippinError
from pippin.messages import Submit, TokenDelta
from pippin.scheduler.launched import Launched
from pippin.scheduler.scheduler import Scheduler
from pippin.scheduler.step_times import StepTimes
from pippin.scheduler.traffic.traffic import Traffic

LONG_STEP_SECONDS = 0.05  # a step of prompts alone that is longer than this,
LONG_STEP_FACTOR = 30  # and than so many times what the host does in between, hides little of it
COMPILING_SECONDS = 0.01  # to wait for a grammar at a time, where nothing else is to be done
FLUSH_SECONDS = 2.5  # to write what waits to be written, when the engine stops
MAX_FAILED_STEPS = 3  # in a row: then the device is taken for dead

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
        self.failure: PippinError | None = None  # why no step will be run any more
        self.on_start: Callable[[list[str]], None] = lambda ids: None  # hears before a launch
        self.warm_up = WarmUp(backend, lambda nbytes: nbytes <= scheduler.budget.free)

    @property
    def idle(self) -> bool:
        if self.failure is not None:
            return True
        return self._in_flight is None and not self.scheduler.has_work

    def has_room(self, submit: Submit) -> bool:
        """Whether the queue would take it now; what can never run is taken, and answered so."""
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

    def step(self) -> list[TokenDelta]:
        """Launch one step and commit one; returns what clients are owed. Blocks at most once.

        When several steps in a row have failed, everybody has been told, `failure` says so, and
        further calls do nothing.
        """
        if self.failure is not None:
            return []
        if self._paused:
            self.backend.make_way(busy=True)
        deltas = self.scheduler.take_outbox()
        self._dispatch(deltas)
        previous = self._in_flight
        launched = None if self._comes_first(previous) else self._launch(deltas)
        if previous is not None and self._in_flight is previous:
            self._in_flight = None
            deltas += self._commit(previous)
        if launched is not None and self._sampled(launched, deltas):
            if self.overlap:
                self._in_flight = launched
            else:
                deltas += self._commit(launched)
        if previous is None and launched is None:
            self._wait_for_others()
        if self._num_failed >= MAX_FAILED_STEPS:
            deltas += self._give_up()
        elif self.idle and not self._paused and self.scheduler.cache is not None:
            self.scheduler.cache.check_when_idle()
            self.scheduler.traffic.check_when_idle()
        self._paused = self.idle
        if self._paused:
            self.backend.make_way(busy=False)
        return deltas

    def status(self) -> dict[str, Any]:
        cache = self.scheduler.cache
        return self.counters() | {"cache": cache.report() if cache is not None else None}

    def counters(self) -> dict[str, Any]:
        """Its numbers alone: nothing in it takes longer the more is cached."""
        scheduler = self.scheduler
        cache, tiers = scheduler.cache, scheduler.traffic.counters()
        return {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "slots": scheduler.slots.num_slots,
            "overlap": self.overlap,
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
        }

    def flush_cache(self) -> dict[str, Any]:
        cache = self.scheduler.cache
        if cache is None:
            return {"freed_bytes": 0, "kept_bytes": 0}
        before = cache.nbytes
        freed = self.scheduler.traffic.flush()
        return {
            "freed_bytes": before - cache.nbytes,
            "kept_bytes": cache.nbytes,
            "freed_host_bytes": freed.get("host", 0),
            "freed_disk_bytes": freed.get("disk", 0),
        }

    def close(self) -> None:
        if self._in_flight is not None:
            self._fail(self._in_flight.plan, DeviceFailed("stopped"), self._in_flight.pending)
            self._in_flight = None
        if self.failure is None:
            self._write_behind(self.scheduler.traffic)
        self.scheduler.traffic.close()
        self.backend.close()
        if self.scheduler.compiler is not None:
            self.scheduler.compiler.close()

    def _write_behind(self, traffic: Traffic) -> None:
        """What waits to be written, as far as whoever stops us has the patience."""
        traffic.give_up_loads()
        deadline = perf_counter() + FLUSH_SECONDS
        while traffic.hurry() and perf_counter() < deadline:
            plan = self.scheduler.plan_spill()
            if plan is None:
                traffic.wait(COMPILING_SECONDS)
                continue
            try:
                self.scheduler.commit(plan.step, self.backend.launch(plan).wait())
            except Exception as error:
                self._fail(plan, error)
                return

    def _wait_for_others(self) -> None:
        """Nothing can be launched or committed: a grammar is compiled, or something is loaded."""
        scheduler = self.scheduler
        scheduler.compiling.wait(COMPILING_SECONDS)
        scheduler.traffic.wait(COMPILING_SECONDS)

    def _dispatch(self, deltas: list[TokenDelta]) -> None:
        launched = self._in_flight
        if launched is None:
            return
        try:
            launched.pending.dispatch()
        except Exception as error:
            self._in_flight = None
            deltas += self._fail(launched.plan, error, launched.pending)

    def _comes_first(self, launched: Launched | None) -> bool:
        """Whether a step in flight is to be committed before the next one is planned."""
        if launched is None or launched.plan.decode:
            return False
        if launched.plan.samples_at_once:
            return True
        metrics, pace = self.scheduler.metrics, self.scheduler.pace
        host_seconds = metrics.records[-1].plan_seconds if metrics.records else 0.0
        seconds = pace.prompt_seconds(launched.plan.num_prefill_tokens)
        return seconds > max(LONG_STEP_SECONDS, LONG_STEP_FACTOR * host_seconds)

    def _launch(self, deltas: list[TokenDelta]) -> Launched | None:
        planned_at = perf_counter()
        plan = self.scheduler.plan()
        deltas += self.scheduler.take_outbox()
        if plan is None:
            return None
        if plan.admit:
            started = [self.scheduler.running_slots[admit.slot].request for admit in plan.admit]
            for request in started:
                request.note_start(planned_at)
            self.on_start([request.id for request in started])
        try:
            pending = self.backend.launch(plan)
        except Exception as error:
            if self._in_flight is not None:  # steps end in order
                deltas += self._commit(self._in_flight)
                self._in_flight = None
            deltas += self._fail(plan, error)
            return None
        launched = Launched(plan, pending, planned_at, perf_counter(), self._paused)
        if self.scheduler.observer is not None:
            self.scheduler.observer.step_launched(plan, self.scheduler.running_slots)
        return launched

    def _sampled(self, launched: Launched, deltas: list[TokenDelta]) -> bool:
        """Launch the sampling of grammar rows: their masks need the tokens just committed."""
        if not launched.plan.masked_slots:
            return True
        try:
            launched.pending.sample(self.scheduler.masks(launched.plan))
        except Exception as error:
            deltas += self._fail(launched.plan, error, launched.pending)
            return False
        return True

    def _fail(
        self, plan: StepPlan, error: Exception, pending: PendingStep | None = None
    ) -> list[TokenDelta]:
        """The plan's requests are told; the others go on."""
        logger.error("step %d failed", plan.step, exc_info=error)
        lost = isinstance(error, DeviceFailed)  # as the backend says itself
        self._num_failed = MAX_FAILED_STEPS if lost else self._num_failed + 1
        self._last_error = error
        if pending is not None:
            pending.discard()
        return self.scheduler.fail_step(plan.step, error)

    def _give_up(self) -> list[TokenDelta]:
        """The device is dead: nothing more is launched, and everybody is told."""
        error = self._last_error
        cause = f"the device failed {self._num_failed} steps in a row: {str(error) or repr(error)}"
        self.failure = error if isinstance(error, DeviceFailed) else DeviceFailed(cause)
        if self._in_flight is not None:
            self._in_flight.pending.discard()
            self._in_flight = None
        return self.scheduler.fail_all(self.failure)

    def _commit(self, launched: Launched) -> list[TokenDelta]:
        plan = launched.plan
        began = perf_counter()
        try:
            result = launched.pending.wait()
        except Exception as error:
            return self._fail(plan, error, launched.pending)
        self._num_failed = 0
        resumed = perf_counter()
        waited = resumed - began
        deltas = self.scheduler.commit(plan.step, result)
        timed = self._step_times.ended(
            decode_rows=len(plan.decode),
            prefill_tokens=plan.num_prefill_tokens,
            dispatched=result.dispatched,
            launched=launched.launched_at,
            resumed=resumed,
            waited=waited,
        )
        if timed is not None:
            self.scheduler.pace.observe(timed)
        record = launched.record(
            result,
            waited=waited,
            resumed=resumed,
            committed=perf_counter(),
            ghosts=self.scheduler.last_ghosts,
        )
        self.scheduler.metrics.add(record)
        if self.scheduler.observer is not None:
            self.scheduler.observer.step_committed(plan, record)
        return deltas
