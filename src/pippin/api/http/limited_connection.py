"""uvicorn's HTTP/1.1 connection, with limits of number and time. Knows no requests.

    number    more than --max-connections: an idle one is closed, else the new one gets a 429
    head      must arrive within --header-timeout of its first byte, or after connecting
    idle      a connection between two requests is kept for --idle-timeout
    reader    one that reads nothing for --send-timeout while there is data is disconnected

h11 refuses heads of more than 16 KiB. What it cannot parse gets an error of the usual shape.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import h11
import msgspec
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pippin.api.http.chunk_writer import with_chunk_writer
from pippin.api.http.http_errors import (
    HeadTooLarge,
    TooManyConnections,
    TooSlow,
    error_body,
    error_response,
)
from pippin.api.http.request_log import RequestLog
from pippin.config import LimitsConfig
from pippin.errors import PippinError, RequestError

# So many connections above the limit get a 429; those beyond are closed at once.
NUM_REFUSED = 64
LINGER_SECONDS = 1.0
SPARE_FILES = 128  # for other files of the process

logger = logging.getLogger(__name__)


def uvicorn_config(app: ASGIApp, limits: LimitsConfig, **options: Any) -> uvicorn.Config:
    """For a server with `limits`; `options` are uvicorn's own."""
    return uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], partial(LimitedConnection, limits=limits)),
        ws="none",
        timeout_keep_alive=limits.idle_timeout,
        access_log=False,  # every request has its own line
        log_config=None,  # uvicorn logs where we do
        server_header=False,
        proxy_headers=False,
        **options,
    )


def allow_open_files(limits: LimitsConfig) -> None:
    """Raise the limit to that of connections: on macOS a process has 256 by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.max_connections + NUM_REFUSED + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as error:  # macOS has a limit below an infinite `hard`
            logger.warning(
                "connections: %d need %d open files, and the system allows %d (%s): "
                "lower --max-connections, or raise `ulimit -n`",
                limits.max_connections,
                wanted,
                soft,
                error,
            )


class LimitedConnection(H11Protocol):
    def __init__(self, *args: Any, limits: LimitsConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app = with_chunk_writer(self.app, self)
        self._limits = limits
        self._head_timer = _Timer(self.loop, limits.header_timeout)
        self._stall_timer = _Timer(self.loop, limits.send_timeout)
        self._num_received = 0
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        surplus = len(self.connections) - self._limits.max_connections
        if surplus > 0 and not self._close_an_idle_one():
            self.app = _refusing_app(self._limits)
            if surplus > NUM_REFUSED:
                transport.abort()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.stop()
        self._stall_timer.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._num_received += len(data)
        super().data_received(data)
        self._expect_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._num_received = 0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer.start(self.transport.abort)

    def resume_writing(self) -> None:
        self._stall_timer.stop()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            self._refuse(HeadTooLarge("the head of the request is larger than 16 KiB"))
        else:
            self._refuse(RequestError(f"this is not HTTP/1.1: {error or msg}"))

    def _unsupported_upgrade_warning(self) -> None:
        """Not logged: some clients offer HTTP/2 with every request."""

    @property
    def _answers(self) -> bool:
        """Whether a request's head has arrived and its reply is not yet complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_head(self) -> None:
        """Also while the rest of a body arrives after its reply."""
        if self._answers or self.transport.is_closing():
            self._head_timer.stop()
        elif self.timeout_keep_alive_task is None:
            self._head_timer.start(self._head_is_late)

    def _head_is_late(self) -> None:
        if self._num_received and self.conn.our_state is h11.IDLE:
            limit = f"{self._limits.header_timeout:g} s (--header-timeout)"
            self._refuse(TooSlow(f"the head of the request did not arrive within {limit}"))
        else:
            self.transport.close()

    def _refuse(self, error: PippinError) -> None:
        """Answer without the app and close; if a reply has started, close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        self._refused = True
        if self.cycle is not None:  # the app waits for the rest of a body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = msgspec.json.encode(error_body(error))
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        head = h11.Response(status_code=error.status, headers=headers)
        for event in (head, h11.Data(body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # Closing at once, with unread bytes of the client's, could discard the answer.
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _close_an_idle_one(self) -> bool:
        for other in self.connections:
            if isinstance(other, LimitedConnection) and other.timeout_keep_alive_task is not None:
                other.timeout_keep_alive_handler()
                return True
        return False


def _refusing_app(limits: LimitsConfig) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        error = TooManyConnections(
            f"{limits.max_connections:,} connections are open, and no more are allowed "
            "(--max-connections); try again later"
        )
        response = error_response(error)
        response.headers["connection"] = "close"
        await response(scope, receive, send)

    return RequestLog(app)


class _Timer:
    """Calls something once, unless it is stopped. Starting it again changes nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._handle: asyncio.TimerHandle | None = None

    def start(self, call: Callable[[], None]) -> None:
        if self._handle is None:
            self._handle = self._loop.call_later(self._seconds, call)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
