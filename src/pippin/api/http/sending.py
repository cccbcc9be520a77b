"""Sends a reply, as a stream or whole, while its client is connected.

A client that disconnects cancels the work. A stream's headers are sent within `GRACE_SECONDS`: an
error before that is a status, a later one a part of the stream. While there is nothing to send,
comments, or what a dialect has for it, keep the connection open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from time import monotonic
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pippin.api.http.answers import (
    CLIENT_CLOSED_REQUEST,
    ErrorResponse,
    JSONResponse,
    internal_error,
    record_of,
)
from pippin.api.http.limited_connection import ChunkWriter
from pippin.errors import PippinError

HEARTBEAT_SECONDS = 10.0
T = TypeVar("T")
GRACE_SECONDS = 0.2
EVENTS, JSON_LINES = "text/event-stream", "application/x-ndjson"
HEARTBEAT = b": still here\n\n"  # of events


class WholeResponse(Response):
    def __init__(self, work: Callable[[], Awaitable[Any]], timeout_s: float | None) -> None:
        super().__init__()
        self._work = work
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await unless_disconnected(receive, self._run())
        await (response or Response(status_code=CLIENT_CLOSED_REQUEST))(scope, receive, send)

    async def _run(self) -> Response:
        try:
            return JSONResponse(await in_time(self._work(), self._timeout_s))
        except PippinError as error:
            return ErrorResponse(error)


class StreamResponse(Response):
    """Sends `events` as they arrive; after an error, the bytes of `encode_error`."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        encode_error: Callable[[PippinError], bytes],
        timeout_s: float | None,
        media_type: str = EVENTS,
        heartbeat: Callable[[], bytes] = lambda: HEARTBEAT,
    ) -> None:
        super().__init__()
        self._media_type = media_type
        self._heartbeat = heartbeat
        self._events = events
        self._encode_error = encode_error
        self._timeout_s = timeout_s
        self._send_message: Send
        self._timer: asyncio.TimerHandle  # of the headers, then of heartbeats
        self._writer: ChunkWriter | None = None
        self._sending: set[asyncio.Task[None]] = set()  # headers or a heartbeat
        self._started = self._head_sent = False
        self._sent_at = monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send_message = send
        self._writer = ChunkWriter.of(scope)
        try:
            await unless_disconnected(receive, self._run(scope, receive, send))
        finally:
            await self._events.aclose()  # if the client disconnected before the start

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._timer = asyncio.get_running_loop().call_later(GRACE_SECONDS, self._start_soon)
        failure: Exception | None = None
        try:
            await in_time(self._send_events(), self._timeout_s)
        except Exception as error:
            failure = error
        finally:
            self._timer.cancel()
            for task in self._sending:
                task.cancel()
        if failure is None:
            await self._send(b"", more=False)
            return
        shown = failure if isinstance(failure, PippinError) else internal_error()
        if not self._started:
            await ErrorResponse(shown)(scope, receive, send)
        else:
            record_of(scope).error = shown.code
            await self._send(self._encode_error(shown), more=False)
        if shown is not failure:
            raise failure

    async def _send_events(self) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                if self._writer is None or not self._head_sent:
                    await self._send(event)
                    continue
                self._sent_at = monotonic()
                if self._writer.write(event):
                    await self._writer.drained()

    def _start_soon(self) -> None:
        """Headers, if there is nothing else to send yet."""
        if not self._started:
            self._send_soon(self._start())
        self._beat_later(HEARTBEAT_SECONDS)

    def _beat_later(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._beat)

    def _beat(self) -> None:
        """Comments, or a dialect's own, while there is nothing else to send."""
        left = self._sent_at + HEARTBEAT_SECONDS - monotonic()
        self._beat_later(left if left > 0 else HEARTBEAT_SECONDS)
        if left > 0:
            return
        if self._writer is None or not self._head_sent:
            self._send_soon(self._send(self._heartbeat()))
        elif not self._writer.is_paused:
            self._sent_at = monotonic()
            self._writer.write(self._heartbeat())

    def _send_soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _start(self) -> None:
        if not self._started:
            self._started = True
            headers = [  # others add theirs
                (b"content-type", f"{self._media_type}; charset=utf-8".encode()),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            head = {"type": "http.response.start", "status": 200, "headers": headers}
            await self._send_message(head)
            self._head_sent = True

    async def _send(self, body: bytes, *, more: bool = True) -> None:
        await self._start()
        self._sent_at = monotonic()
        message = {"type": "http.response.body", "body": body, "more_body": more}
        await self._send_message(message)


async def in_time(work: Awaitable[T], timeout_s: float | None) -> T:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():  # not this timeout
            raise
        raise PippinError(
            f"the reply was not complete after {timeout_s:g} s (timeout, --request-timeout)",
            code="deadline_passed",
        ) from error


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The work's result; None if the client disconnected first; then the work is cancelled."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
