"""Several models in memory for few: starts and stops their engines, and which requests wait.

lease(name) ──▶ waits for its turn ──▶ Lease: its engine is not stopped before it is released

    stopped ──▶ loading ──▶ ready ──▶ stopping ──▶ stopped
                   └─ failed ──▶ stopped

A request takes a *lease* on its model; an engine with a lease is never stopped. A model that is
stopped and has waiting requests is a claimant. Claimants start in order of their oldest request,
one after the other. If memory is short, ready engines without a lease are stopped, the least
recently used first. If that is not enough, the claimant waits for `turn_s` seconds, and as long as
each engine in its way had for itself; then those that have been ready for longest yield: they give
no new leases, the replies that run end by themselves, and the engines are stopped.

So a claimant waits at most for one turn, the longest running reply, and a stop and a load, for
itself and for each claimant before it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from pippin.engine.engine_pool import EnginePool
from pippin.errors import NotReady, Overloaded, PippinError
from pippin.messages import Ready

FIRST_RETRY_S, LONGEST_RETRY_S = 5.0, 300.0  # after a load that failed


class State(StrEnum):
    STOPPED = "stopped"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


@dataclass(frozen=True)
class Ticket:
    """A request that waits for a lease."""

    id: int
    name: str  # of its model
    place: int  # among all that waited when it arrived; 0: it did not wait
    asked_at: float


@dataclass
class ModelTurn:
    """One model: its state, and what uses it."""

    name: str
    nbytes: int
    keep_alive: float | None  # seconds without a request until it is unloaded; None: for ever
    state: State = State.STOPPED
    num_open: int = 0  # leases
    waiting: dict[int, Ticket] = field(default_factory=dict)  # in order of arrival
    ready_at: float = 0.0
    used_at: float = 0.0
    started_at: float = 0.0
    load_s: float = 1.0  # the last load's duration
    num_failures: int = 0  # in a row
    failure: str = ""
    retry_at: float = -math.inf

    @property
    def oldest(self) -> Ticket | None:
        return next(iter(self.waiting.values()), None)

    @property
    def is_idle(self) -> bool:
        return self.state is State.READY and not self.num_open and not self.waiting

    @property
    def expires_at(self) -> float | None:
        """When it is unloaded if no request arrives; None: it is not, or not ready."""
        if self.state is not State.READY or self.keep_alive is None:
            return None
        return self.used_at + self.keep_alive


@dataclass
class Decision:
    start: list[str] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)
    granted: list[Ticket] = field(default_factory=list)


class Turns:
    def __init__(
        self, models: Iterable[ModelTurn], *, budget: int, turn_s: float, max_waiting: int
    ) -> None:
        self.models = {model.name: model for model in models}
        self.budget = budget
        self.turn_s = turn_s
        self._max_waiting = max_waiting  # requests for one model
        self._ids = itertools.count()
        self._yielding: set[str] = set()
        self._claimant: str | None = None  # for which they yield
        largest = max(self.models.values(), key=lambda model: model.nbytes)
        assert largest.nbytes <= budget, f"{largest.name} does not fit alone"

    # ---- requests --------------------------------------------------------------------------

    def ask(self, name: str, now: float) -> Ticket:
        """A place among those that wait; `decide` grants it, at once if its model is ready.

        Raises NotReady for a model whose load failed a short time ago, Overloaded if too many wait.
        """
        model = self.models[name]
        if now < model.retry_at:
            raise self.refusal(name, now)
        if len(model.waiting) >= self._max_waiting:
            raise _later(
                Overloaded(
                    f"{len(model.waiting):,} requests wait for the model {name} to be loaded, "
                    f"which is the limit (--max-queue): send this one again later"
                ),
                self.expected_wait(name, now),
            )
        waits = model.state is not State.READY or name in self._yielding
        place = 1 + sum(len(each.waiting) for each in self.models.values()) if waits else 0
        ticket = Ticket(next(self._ids), name, place, now)
        model.waiting[ticket.id] = ticket
        return ticket

    def take(self, name: str, now: float) -> Ticket | None:
        """A lease at once; None: the model is not ready, or yields."""
        model = self.models[name]
        if model.state is not State.READY or name in self._yielding:
            return None
        model.num_open += 1
        model.used_at = now
        return Ticket(next(self._ids), name, 0, now)

    def cancel(self, ticket: Ticket) -> None:
        """Its client disconnected. A ticket that was granted has a lease to release instead."""
        self.models[ticket.name].waiting.pop(ticket.id, None)

    def release(self, name: str, now: float) -> None:
        model = self.models[name]
        assert model.num_open > 0, f"{name} has no lease"
        model.num_open -= 1
        model.used_at = now

    def expected_wait(self, name: str, now: float) -> float:
        """Seconds until a request that arrives now would be granted, roughly."""
        before = [each for each in self._claimants() if each.name != name]
        own = self.models[name].load_s
        return own + sum(each.load_s + self.turn_s for each in before) + self.turn_s

    # ---- engines ---------------------------------------------------------------------------

    def loaded(self, name: str, now: float) -> None:
        model = self.models[name]
        assert model.state is State.LOADING, model
        model.state = State.READY
        model.ready_at = model.used_at = now
        model.load_s = now - model.started_at
        model.num_failures = 0

    def ending(self, name: str) -> None:
        """Its engine is being stopped, or has died: it gives no leases, and its memory is used."""
        self.models[name].state = State.STOPPING

    def stopped(self, name: str) -> None:
        """Its memory is free, whether it was asked to stop or died."""
        self.models[name].state = State.STOPPED
        self._yielding.discard(name)

    def failed(self, name: str, reason: str, now: float) -> list[Ticket]:
        """It cannot be loaded, or died too often: those that waited for it are turned away."""
        self.stopped(name)
        model = self.models[name]
        model.failure = reason
        model.retry_at = now + min(FIRST_RETRY_S * 2.0**model.num_failures, LONGEST_RETRY_S)
        model.num_failures += 1
        turned_away = list(model.waiting.values())
        model.waiting.clear()
        return turned_away

    def refusal(self, name: str, now: float) -> PippinError:
        model = self.models[name]
        why = NotReady(f"the model {name} could not be loaded: {model.failure}")
        return _later(why, model.retry_at - now)

    # ---- decisions -------------------------------------------------------------------------

    def decide(self, now: float) -> Decision:
        """What is to be done now. Called after every event, and at `next_time`."""
        decision = Decision()
        for model in self.models.values():
            if model.is_idle and (end := model.expires_at) is not None and end <= now:
                self._stop(model, decision)
        self._start_claimants(now, decision)
        self._grant(now, decision)
        return decision

    def next_time(self, now: float) -> float | None:
        """When time alone may change what `decide` returns."""
        times = [model.expires_at for model in self.models.values() if model.is_idle]
        if (head := self._head()) is not None and head.oldest is not None:
            times.append(head.oldest.asked_at + self.turn_s)
            ready = [each for each in self.models.values() if each.state is State.READY]
            times += [model.ready_at + self.turn_s for model in ready]
        return min((time for time in times if time is not None and time > now), default=None)

    def _start_claimants(self, now: float, decision: Decision) -> None:
        while (head := self._head()) is not None:
            if head.name != self._claimant:
                self._yielding.clear()
                self._claimant = head.name
            used = (m.nbytes for m in self.models.values() if m.state is not State.STOPPED)
            missing = head.nbytes - (self.budget - sum(used))
            if missing > 0:
                self._make_room(missing, head, now, decision)
                return
            head.state, head.started_at = State.LOADING, now
            decision.start.append(head.name)
        self._yielding.clear()
        self._claimant = None

    def _make_room(self, missing: int, head: ModelTurn, now: float, decision: Decision) -> None:
        """Stop engines without a lease if that is enough; else let others yield, if it is time."""
        missing -= sum(m.nbytes for m in self.models.values() if m.state is State.STOPPING)
        idle = [m for m in self.models.values() if m.is_idle or self._has_yielded(m)]
        idle.sort(key=lambda model: (model.name not in self._yielding, model.used_at))
        if sum(model.nbytes for model in idle) >= missing:
            for model in idle:
                if missing > 0:
                    missing -= model.nbytes
                    self._stop(model, decision)
            return
        assert head.oldest is not None, "a claimant has a request"
        if now < head.oldest.asked_at + self.turn_s:
            return
        missing -= sum(m.nbytes for m in self.models.values() if m.name in self._yielding)
        others = [
            model
            for model in self.models.values()
            if model.state is State.READY
            and model.name not in self._yielding
            and (model.is_idle or now >= model.ready_at + self.turn_s)
        ]
        others.sort(key=lambda model: (not model.is_idle, model.ready_at))
        if sum(model.nbytes for model in others) < missing:  # some have not had their turn
            return
        for model in others:
            if missing > 0:
                missing -= model.nbytes
                self._yielding.add(model.name)

    def _grant(self, now: float, decision: Decision) -> None:
        for model in self.models.values():
            if model.state is State.READY and model.name not in self._yielding:
                granted = list(model.waiting.values())
                model.waiting.clear()
                model.num_open += len(granted)
                if granted:
                    model.used_at = now
                decision.granted += granted

    def _stop(self, model: ModelTurn, decision: Decision) -> None:
        assert model.num_open == 0, f"{model.name} has a lease"
        model.state = State.STOPPING
        self._yielding.discard(model.name)
        decision.stop.append(model.name)

    def _has_yielded(self, model: ModelTurn) -> bool:
        return model.state is State.READY and not model.num_open and model.name in self._yielding

    def _claimants(self) -> list[ModelTurn]:
        found = [m for m in self.models.values() if m.state is State.STOPPED and m.waiting]
        return sorted(found, key=lambda model: next(iter(model.waiting)))

    def _head(self) -> ModelTurn | None:
        return next(iter(self._claimants()), None)


def _later(error: PippinError, seconds: float) -> PippinError:
    error.retry_after_s = max(1, math.ceil(seconds))
    return error


SHUTTING_DOWN = "the server is shutting down"

logger = logging.getLogger(__name__)


class EngineHost(Protocol):
    """An engine, and what keeps it running; see `startup/engines.py`."""

    @property
    def engine(self) -> EnginePool: ...

    @property
    def loaded(self) -> asyncio.Future[Ready]: ...

    async def run(self) -> None:
        """Until it is cancelled; a PippinError says why it cannot go on."""
        ...


@dataclass(frozen=True)
class Lease:
    host: EngineHost
    ticket: Ticket
    waited_s: float  # for the model to be loaded


class ModelEngines:
    def __init__(
        self,
        turns: Turns,
        start: Callable[[str], EngineHost],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._turns = turns
        self._start = start
        self._clock = clock
        self.loaded: dict[str, EngineHost] = {}
        self._runs: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}
        self._waiting: dict[int, asyncio.Future[EngineHost]] = {}  # by ticket
        self._timer: asyncio.TimerHandle | None = None
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.draining = False
        self.num_loads = dict.fromkeys(turns.models, 0)

    # ---- requests --------------------------------------------------------------------------

    def turn(self, name: str) -> ModelTurn:
        return self._turns.models[name]

    def seconds_left(self, name: str) -> float | None:
        """Until it is unloaded, if no request arrives; None: it stays."""
        end = self.turn(name).expires_at
        return None if end is None else max(0.0, end - self._clock())

    def check_ready(self) -> None:
        if self.draining:
            raise NotReady(SHUTTING_DOWN)

    def lease_now(self, name: str) -> Lease | None:
        """None: the request has to wait, or is refused."""
        ticket = None if self.draining else self._turns.take(name, self._clock())
        if ticket is None:
            return None
        self._none_open.clear()
        return Lease(self.loaded[name], ticket, 0.0)

    async def lease(self, name: str) -> Lease:
        """When the model is loaded. Overloaded or NotReady if the request is turned away."""
        self.check_ready()
        asked_at = self._clock()
        ticket = self._turns.ask(name, asked_at)
        granted = self._waiting[ticket.id] = asyncio.get_running_loop().create_future()
        self.advance()
        try:
            host = await granted
        except BaseException:
            if granted.cancelled() or granted.exception() is not None:
                self._turns.cancel(ticket)
            else:  # granted at the moment in which its client disconnected
                self._turns.release(name, self._clock())
            self.advance()
            raise
        finally:
            del self._waiting[ticket.id]
        return Lease(host, ticket, self._clock() - asked_at)

    def release(self, lease: Lease) -> None:
        self._turns.release(lease.ticket.name, self._clock())
        self.advance()

    def keep_alive(self, name: str, seconds: float | None) -> None:
        """From its last request on; 0 unloads it when its last reply ends. None: it stays."""
        self.turn(name).keep_alive = seconds
        self.advance()

    # ---- the server ------------------------------------------------------------------------

    async def run(self) -> None:
        """Until it is cancelled: then engines are stopped."""
        try:
            await self._fault
        finally:
            tasks = [task for task, _ in self._runs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_open(self) -> int:
        return sum(model.num_open for model in self._turns.models.values())

    def drain(self) -> None:
        """Refuse new requests and those that wait. `drained` waits for the open ones to end."""
        self.draining = True
        for granted in self._waiting.values():
            if not granted.done():
                granted.set_exception(NotReady(SHUTTING_DOWN))

    async def drained(self) -> None:
        await self._none_open.wait()

    def close(self) -> None:
        self.drain()
        for host in self.loaded.values():
            host.engine.close()

    # ----------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Do what is decided now, and look again when time alone changes it."""
        now = self._clock()
        decision = self._turns.decide(now)
        for name in decision.stop:
            logger.info("the model %s is unloaded", name)
            self._runs[name][1].set()
        for name in decision.start if not self.draining else ():
            stop = asyncio.Event()
            task = asyncio.create_task(self._run(name, stop), name=f"engine of {name}")
            self._runs[name] = (task, stop)
        for ticket in decision.granted:
            granted = self._waiting[ticket.id]
            if granted.done():  # its client has disconnected, or the server shuts down
                self._turns.release(ticket.name, now)
            else:
                granted.set_result(self.loaded[ticket.name])
        if self.num_open:
            self._none_open.clear()
        else:
            self._none_open.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (wakes_at := self._turns.next_time(now)) is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, wakes_at - now) + 0.001, self.advance)

    async def _run(self, name: str, stop: asyncio.Event) -> None:
        """One engine, from its start until its process has exited."""
        reason: str | None = None
        try:
            reason = await self._serve(name, self._start(name), stop)
        except PippinError as error:
            reason = error.message
        except Exception as error:  # a fault of the server's: it exits
            reason = f"internal error: {error!r}"
            if not self._fault.done():
                self._fault.set_exception(error)
        finally:
            del self._runs[name]
            self._end(name, reason)

    async def _serve(self, name: str, host: EngineHost, stop: asyncio.Event) -> str | None:
        """Until it is asked to stop; else the reason why it ended."""
        running = asyncio.create_task(host.run())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((running, host.loaded), return_when=asyncio.FIRST_COMPLETED)
            if host.loaded.done():
                self._turns.loaded(name, self._clock())
                self.loaded[name] = host
                self.num_loads[name] += 1
                logger.info(
                    "the model %s was loaded in %.1f s", name, self._turns.models[name].load_s
                )
                self.advance()
                await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
                return "the engine exited"
            return None
        finally:
            self._turns.ending(name)
            self.loaded.pop(name, None)
            host.engine.close()
            stopping.cancel()
            running.cancel()
            await asyncio.wait((running, stopping))

    def _end(self, name: str, reason: str | None) -> None:
        if reason is None:
            self._turns.stopped(name)
        else:
            logger.error("the model %s is not served now: %s", name, reason)
            now = self._clock()
            for ticket in self._turns.failed(name, reason, now):
                if not (granted := self._waiting[ticket.id]).done():
                    granted.set_exception(self._turns.refusal(name, now))
        if not self.draining:
            self.advance()
