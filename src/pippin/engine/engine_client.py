"""Requests on an engine, and on the next one if that is lost. Knows no text, no HTTP, no process.

    open requests   [ waiting: the engine has not started | started ]
    engine lost       submitted to the next engine        ended with an error

Nothing of a request that has not started was computed or sent, so it may be submitted to another
engine, unless it may be what this one died of (`clients/suspects.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from pippin.engine.clients.questions import Questions
from pippin.engine.clients.replica_number import check_replica
from pippin.engine.clients.suspects import OpenRequest, Suspects, to_resubmit
from pippin.engine.clients.watchers import Watchers, WatchEvent
from pippin.errors import DeviceFailed, EngineDead, NotReady, RequestError
from pippin.messages import (
    Abort,
    Answer,
    Compiled,
    Delivered,
    FeedMessage,
    Finish,
    FlushCache,
    GetCounters,
    GetNode,
    GetStatus,
    Question,
    Started,
    Submit,
    ToEngine,
    TokenBatch,
    TokenDelta,
)


class Engine(Protocol):
    """What the API asks of an engine, wherever it runs."""

    @property
    def healthy(self) -> bool: ...

    @property
    def reason(self) -> str | None:
        """Why the engine is not healthy."""
        ...

    def check_ready(self) -> None:
        """Raise NotReady unless new requests are taken."""
        ...

    def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        """The request's deltas up to its terminal one; NotReady if it is not taken.

        What has arrived since the last one was read is one delta.
        A generator closed or cancelled before that aborts the request.
        """
        ...

    def abort(self, id: str) -> None:
        """The client disconnected. Unknown and finished ids are ignored."""
        ...

    def finish(self, id: str) -> None:
        """The reply is complete (a stop string): no more deltas of it are wanted."""
        ...

    async def status(self) -> dict[str, Any]: ...

    async def counters(self) -> dict[str, Any]:
        """The numbers of a status: cheap, however much is cached."""
        ...

    async def flush_cache(self) -> dict[str, Any]: ...

    def watch(self, replica: int = 0) -> AsyncGenerator[WatchEvent, None]:
        """What the engine does, from now on and over its restarts; Overloaded if too many watch."""
        ...

    async def node(self, node: int, replica: int = 0) -> dict[str, Any]:
        """The tokens of a node that watchers were sent; {} if there is none."""
        ...

    def restart(self) -> None:
        """Begin to replace replicas one after another; RequestError if there is only one."""
        ...


class Sender(Protocol):
    """The way to one engine."""

    @property
    def alive(self) -> bool:
        """Whether the engine runs: what is sent to one that does not is never read."""
        ...

    def send(self, message: ToEngine) -> None: ...


class EngineClient:
    """A supervisor calls it: an engine is ready, it is lost, a message of it arrived."""

    def __init__(self, suspects: Suspects | None = None) -> None:
        self._requests: dict[str, OpenRequest] = {}  # in order of arrival
        self._questions = Questions(self._send)
        self._sender: Sender | None = None
        self.reason: str | None = "the model is being loaded"
        self._watchers = Watchers(self._send)
        self._suspects = suspects or Suspects()
        self.draining = False
        self._none_open = asyncio.Event()
        self._none_open.set()

    # ---- what the API asks for -------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        return self.reason is None

    def check_ready(self) -> None:
        if self.draining:
            raise NotReady("the server is shutting down")
        if self.reason is not None:
            raise NotReady(self.reason)

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        self.check_ready()
        self._suspects.check(submit)
        request = OpenRequest(submit)
        self.open(request)
        try:
            while True:
                delta = await request.deltas.get()
                if delta.finish is not None:
                    self._forget(submit.id)
                if delta.finish in ("stop", "length"):
                    self._suspects.finished(submit)
                yield delta
                if delta.finish is not None:
                    return
        finally:
            self.abort(submit.id)

    def abort(self, id: str) -> None:
        if self._forget(id):
            self._send(Abort(id))

    def finish(self, id: str) -> None:
        if self._forget(id):
            self._send(Finish(id))

    async def status(self) -> dict[str, Any]:
        return await self._ask(GetStatus)

    async def counters(self) -> dict[str, Any]:
        return await self._ask(GetCounters)

    async def flush_cache(self) -> dict[str, Any]:
        return await self._ask(FlushCache)

    async def node(self, node: int, replica: int = 0) -> dict[str, Any]:
        check_replica(replica, 1)
        return await self._ask(lambda id: GetNode(id, node))

    def watch(self, replica: int = 0) -> AsyncGenerator[WatchEvent, None]:
        check_replica(replica, 1)
        return self._watchers.watch()

    def restart(self) -> None:
        raise RequestError(
            "there is one engine, and requests would be refused while it restarts: start the "
            "server with --replicas 2 or more"
        )

    # ---- engines that start and end --------------------------------------------------------

    def engine_ready(self, sender: Sender) -> None:
        """From now on requests are sent there, first of all those that wait."""
        self._sender = sender
        self.reason = None
        for request in self._requests.values():
            self._submit(request)
        self._watchers.engine_ready()

    def deliver(self, message: Delivered) -> None:
        match message:
            case TokenBatch(deltas=deltas):
                for delta in deltas:
                    self._take(delta)
            case Started(ids=ids) | Compiled(ids=ids):
                for request in (self._requests[id] for id in ids if id in self._requests):
                    request.compiled = True
                    request.started |= isinstance(message, Started)
            case Answer(id=id, data=data, error=error):
                self._questions.answered(id, data, error)
            case FeedMessage():
                self._watchers.deliver(message)

    def exited_as_asked(self) -> bool:
        """Whether the engine that was lost was asked to exit: then that is no failure."""
        return False

    def engine_lost(self, reason: str, *, knows_all: bool = False) -> None:
        """Requests that had started end with an error; the others wait for the next engine.

        `knows_all`: the engine stopped by itself, and everything that it sent was delivered.
        """
        self._sender = None
        self.reason = reason if self.draining else f"{reason}; another is being started"
        self._questions.end(reason)
        self._watchers.engine_lost(self.reason)
        requests = list(self._requests.values())
        kept = set(to_resubmit(requests, knows_all=knows_all))
        self._suspects.engine_lost(each.submit for each in requests if each not in kept)
        for request in requests:
            if request in kept and not self.draining:
                request.returned()
            else:
                self._end(request.submit.id, reason)

    # ---- the end ---------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return len(self._requests)

    def drain(self) -> None:
        """Refuse new requests. `drained` waits for the open ones to end."""
        self.draining = True

    async def drained(self) -> None:
        await self._none_open.wait()

    def close(self) -> None:
        """There will be no engine any more: everything ends."""
        reason = "the server is shutting down"
        self.draining = True
        self._sender = None
        self.reason = reason
        self._questions.end(reason)
        self._watchers.close()
        for id in list(self._requests):
            self._end(id, reason)

    # ----------------------------------------------------------------------------------------

    def open(self, request: OpenRequest) -> None:
        id = request.submit.id
        assert id not in self._requests, f"request id {id} is in use"
        self._requests[id] = request
        self._none_open.clear()
        self._submit(request)

    def _submit(self, request: OpenRequest) -> None:
        if self._sender is not None and self._sender.alive:
            request.sent = True
            request.num_engines += 1
            self._sender.send(request.submit)

    def _send(self, message: ToEngine) -> None:
        if self._sender is not None:  # else no engine has to know
            self._sender.send(message)

    def _take(self, delta: TokenDelta) -> None:
        request = self._requests.get(delta.id)
        if request is None:  # it has ended
            return
        if not request.started and delta.error_code == DeviceFailed.code:
            return  # it failed with all others; the next engine serves it
        request.started = True
        request.deltas.put(delta)

    def _end(self, id: str, reason: str) -> None:
        request = self._requests[id]
        self._forget(id)
        request.deltas.put(
            TokenDelta(
                id,
                finish="error",
                error=reason,
                error_code=EngineDead.code,
                error_status=EngineDead.status,
            )
        )

    def _forget(self, id: str) -> bool:
        """Whether the request was open."""
        was_open = self._requests.pop(id, None) is not None
        if not self._requests:
            self._none_open.set()
        return was_open

    async def _ask(self, question: Callable[[str], Question]) -> dict[str, Any]:
        if self.reason is not None:
            raise NotReady(self.reason)
        return await self._questions.ask(question)
