"""Sends a reply, as a stream or whole, while its client is connected. Knows no dialect.

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

from pippin.api.http.http_errors import (
    CLIENT_CLOSED_REQUEST,
    DeadlinePassed,
    JSONResponse,
    error_response,
    internal_error,
)
from pippin.api.http.request_log import record_of
from pippin.errors import PippinError

T = TypeVar("T")
GRACE_SECONDS = 0.2
HEARTBEAT_SECONDS = 10.0
EVENTS, JSON_LINES = "text/event-stream", "application/x-ndjson"
HEARTBEAT = b": still here\n\n"  # of events


class WholeResponse(Response):
    def __init__(self, work: Callable[[], Awaitable[Any]], timeout_s: float | None) -> None:
        super().__init__()
        self._work = work
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await _unless_disconnected(receive, self._run())
        await (response or Response(status_code=CLIENT_CLOSED_REQUEST))(scope, receive, send)

    async def _run(self) -> Response:
        try:
            return JSONResponse(await _in_time(self._work(), self._timeout_s))
        except PippinError as error:
            return error_response(error)


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
        self._started = False
        self._sent_at = monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_disconnected(receive, self._run(scope, receive, send))
        finally:
            await self._events.aclose()  # if the client disconnected before the start

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        heartbeats = asyncio.create_task(self._send_heartbeats(send))
        failure: Exception | None = None
        try:
            await _in_time(self._send_events(send), self._timeout_s)
        except Exception as error:
            failure = error
        finally:
            heartbeats.cancel()
        if failure is None:
            await self._send(send, b"", more=False)
            return
        shown = failure if isinstance(failure, PippinError) else internal_error()
        if not self._started:
            await error_response(shown)(scope, receive, send)
        else:
            record_of(scope).error = shown.code
            await self._send(send, self._encode_error(shown), more=False)
        if shown is not failure:
            raise failure

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                await self._send(send, event)

    async def _send_heartbeats(self, send: Send) -> None:
        """Headers if there is nothing else to send yet, then comments or a dialect's own."""
        await asyncio.sleep(GRACE_SECONDS)
        await self._start(send)
        while True:
            await asyncio.sleep(self._sent_at + HEARTBEAT_SECONDS - monotonic())
            if monotonic() - self._sent_at >= HEARTBEAT_SECONDS:
                await self._send(send, self._heartbeat())

    async def _start(self, send: Send) -> None:
        if not self._started:
            self._started = True
            headers = [  # others add theirs
                (b"content-type", f"{self._media_type}; charset=utf-8".encode()),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        await self._start(send)
        self._sent_at = monotonic()
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def _in_time(work: Awaitable[T], timeout_s: float | None) -> T:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():  # not this timeout
            raise
        raise DeadlinePassed(
            f"the reply was not complete after {timeout_s:g} s (timeout, --request-timeout)"
        ) from error


async def _unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
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
