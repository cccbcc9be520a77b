"""Starts and stops the engines of several models as `turns.py` decides.

lease(name) ──▶ waits for its turn ──▶ Lease: its engine is not stopped before it is released
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pippin.engine.engine_pool import EnginePool
from pippin.errors import NotReady, PippinError
from pippin.messages import Ready
from pippin.switching.turns import ModelTurn, Ticket, Turns

SHUTTING_DOWN = "the server is shutting down"

logger = logging.getLogger(__name__)


class EngineHost(Protocol):
    """An engine, and what keeps it running; see `startup/replicas.py`."""

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
