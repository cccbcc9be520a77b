"""The server's end of the channel to the engine process. Knows no text and no HTTP."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from pippin.api.pulse import Pulse
from pippin.config import ServerConfig
from pippin.errors import EngineDead, LoadError, PippinError
from pippin.messages import (
    Abort,
    Alive,
    Answer,
    Failed,
    Finish,
    FlushCache,
    FromEngine,
    GetStatus,
    Loading,
    Ready,
    Shutdown,
    Submit,
    ToEngine,
    TokenBatch,
    TokenDelta,
)

TICK_SECONDS = 0.25


class Engine(Protocol):
    """What the API asks of an engine, wherever it runs."""

    @property
    def healthy(self) -> bool: ...

    @property
    def reason(self) -> str | None:
        """Why the engine is not healthy."""
        ...

    def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        """The request's deltas up to its terminal one.

        A generator closed or cancelled before that aborts the request.
        """
        ...

    def abort(self, id: str) -> None:
        """Nobody wants the rest. Unknown and finished ids are ignored."""
        ...

    def finish(self, id: str) -> None:
        """The reply is complete (a stop string): no more deltas of it are wanted."""
        ...

    async def status(self) -> dict[str, Any]: ...

    async def flush_cache(self) -> dict[str, Any]: ...


class ZmqEngine:
    """An engine in another process, which binds both sockets; this side connects."""

    def __init__(
        self,
        to_engine_addr: str,
        from_engine_addr: str,
        *,
        timeout_seconds: float = ServerConfig.engine_timeout,
    ) -> None:
        self._to_engine_addr = to_engine_addr
        self._from_engine_addr = from_engine_addr
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._deltas: dict[str, asyncio.Queue[TokenDelta]] = {}
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._call_ids = (f"call-{n}" for n in itertools.count())
        self._reason: str | None = None  # why it is gone for good
        self._pulse = Pulse(timeout_seconds)
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: asyncio.Future[Ready] | None = None
        self._on_loading: Callable[[str], None] | None = None

    async def start(self, on_loading: Callable[[str], None] | None = None) -> None:
        """Connect. `on_loading` hears how the load goes; `ready` waits for its end."""
        self._on_loading = on_loading
        self._ready = asyncio.get_running_loop().create_future()
        # Sending never blocks (no high-water mark), so abort and finish can be plain calls.
        self._push: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._pull = zmq.asyncio.Context.instance().socket(zmq.PULL)
        for socket in (self._push, self._pull):
            socket.set_hwm(0)
            socket.linger = 200  # ms
        self._push.connect(self._to_engine_addr)
        self._pull.connect(self._from_engine_addr)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    async def ready(self) -> Ready:
        """What the engine says of its model, once loaded; LoadError if it cannot be."""
        assert self._ready is not None, "start first"
        return await asyncio.shield(self._ready)

    async def close(self) -> None:
        """Ask the engine to shut down, and hang up."""
        assert self._tasks, "start first"
        self._send(Shutdown())
        self.engine_died("the server is shutting down")
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self._push.close()
        self._pull.close()

    @property
    def healthy(self) -> bool:
        return self.reason is None

    @property
    def reason(self) -> str | None:
        return self._reason or self._pulse.complaint

    def engine_died(self, reason: str) -> None:
        """End everything that waits for the engine; refuse everything from now on."""
        if self._reason is not None:
            return
        self._reason = reason
        self._end_all(reason)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(LoadError(reason))
            self._ready.exception()  # whoever waits hears it; nobody need wait

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        if (reason := self.reason) is not None:
            yield _dead(submit.id, reason)
            return
        assert submit.id not in self._deltas, f"request id {submit.id} is in use"
        queue = self._deltas[submit.id] = asyncio.Queue()
        self._send(submit)
        try:
            while True:
                delta = await queue.get()
                if delta.finish is not None:
                    self._deltas.pop(submit.id, None)
                yield delta
                if delta.finish is not None:
                    return
        finally:
            self.abort(submit.id)

    def abort(self, id: str) -> None:
        if self._deltas.pop(id, None) is not None:
            self._send(Abort(id))

    def finish(self, id: str) -> None:
        if self._deltas.pop(id, None) is not None:
            self._send(Finish(id))

    async def status(self) -> dict[str, Any]:
        return await self._call(GetStatus(next(self._call_ids)))

    async def flush_cache(self) -> dict[str, Any]:
        return await self._call(FlushCache(next(self._call_ids)))

    async def _call(self, message: GetStatus | FlushCache) -> dict[str, Any]:
        if (reason := self.reason) is not None:
            raise EngineDead(reason)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[message.id] = future
        self._send(message)
        try:
            return await future
        finally:
            del self._answers[message.id]

    def _end_all(self, reason: str) -> None:
        """Tell everybody who waits for the engine that nothing will come."""
        for id, queue in self._deltas.items():
            queue.put_nowait(_dead(id, reason))
        self._deltas.clear()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(EngineDead(reason))

    async def _watch(self) -> None:
        """While the engine hangs, nobody waits for it. If it is heard of again, it is healthy."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._pulse.pass_time(TICK_SECONDS)  # of this loop's time, however long it took
            if (complaint := self._pulse.complaint) is not None:
                for id in self._deltas:
                    self._send(Abort(id))  # once it goes on, it need not do what nobody wants
                self._end_all(complaint)

    def _send(self, message: ToEngine) -> None:
        self._push.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def _read(self) -> None:
        while True:
            frame = await self._pull.recv()
            try:
                message = self._decoder.decode(frame)
            except msgspec.DecodeError as error:
                self.engine_died(f"the engine sent a message that makes no sense: {error}")
                return
            self._deliver(message)

    def _deliver(self, message: FromEngine) -> None:
        match message:
            case TokenBatch(deltas=deltas):
                for delta in deltas:
                    if (queue := self._deltas.get(delta.id)) is not None:  # else: over, for us
                        queue.put_nowait(delta)
            case Alive(stepping=stepping):
                self._pulse.heard(stepping=stepping)
            case Answer(id=id, data=data, error=error):
                self._answer(id, data, error)
            case Loading(stage=stage):
                if self._on_loading is not None:
                    self._on_loading(stage)
            case Failed(message=text):
                self.engine_died(text)
            case Ready() as ready:
                assert self._ready is not None
                self._pulse.heard(stepping=False)
                if not self._ready.done():
                    self._ready.set_result(ready)

    def _answer(self, id: str, data: dict[str, Any], error: str | None) -> None:
        future = self._answers.get(id)
        if future is None or future.done():  # the client has gone meanwhile
            return
        if error is None:
            future.set_result(data)
        else:
            future.set_exception(PippinError(error))


def _dead(id: str, reason: str) -> TokenDelta:
    return TokenDelta(
        id,
        finish="error",
        error=reason,
        error_code=EngineDead.code,
        error_status=EngineDead.status,
    )
