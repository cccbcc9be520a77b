"""uvicorn's HTTP/1.1 connection, with limits of number, time and framing.

    number    more than --max-connections: an idle one is closed, or the oldest that waits for a
              head, of an address with more than its share of these; else the new one gets a 429
    head      must arrive within --header-timeout of its first byte, or after connecting
    idle      a connection between two requests is kept for --idle-timeout
    reader    one that reads nothing for --send-timeout while there is data is disconnected
    chunks    are parsed once a body is asked for, with a bound on their framing
    turns     of large bodies: one is received, or its chunks parsed, some at a time

h11 refuses heads of more than 16 KiB. What it cannot parse gets an error of the usual shape.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import h11
import msgspec
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from pippin.api.http.access_control import network_of
from pippin.api.http.answers import ErrorResponse, RequestLog, error_body
from pippin.config import LimitsConfig
from pippin.errors import PippinError, RequestError

EXTENSION = "pippin.chunk_writer"


class ChunkWriter:
    """Of one request, whose head is sent before the first chunk."""

    def __init__(self, connection: H11Protocol) -> None:
        self._cycle = connection.cycle
        self._flow = connection.flow
        self._transport = connection.transport

    @staticmethod
    def of(scope: Scope) -> ChunkWriter | None:
        """None where bodies have no chunks: in HTTP/1.0, and without a connection of ours."""
        writer: ChunkWriter | None = scope.get("extensions", {}).get(EXTENSION)
        return writer

    @property
    def is_paused(self) -> bool:
        """Whether the client is behind by more than the connection buffers."""
        return self._flow.write_paused and not self._cycle.disconnected

    async def drained(self) -> None:
        await self._flow.drain()

    def write(self, body: bytes) -> bool:
        """Whether the client is behind now. Nothing, once it has disconnected: an empty chunk would
        end the body."""
        if body and not self._cycle.disconnected:
            self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return self._flow.write_paused and not self._cycle.disconnected


# So many connections above the limit get a 429; those beyond are closed at once.
NUM_REFUSED = 64
SHARES = 8  # one of which the clients of one address may have, of connections without a head
LINGER_SECONDS = 1.0
MAX_HEAD_BYTES = 16_384
# Framing of chunks that no body needs: each costs h11 10 us, as much as 10 KB of a body.
FREE_FRAMING_BYTES = 16_384
BODY_BYTES_PER_FRAMING_BYTE = 64  # above that: chunks of 448 bytes
CHUNKS_A_TURN = 128
READ_BYTES = 65_536  # at once
PAUSE_S = 0.001  # between two turns
ACCEPTED_AT_ONCE = 16  # connections
SPARE_FILES = 128  # for other files of the process

logger = logging.getLogger(__name__)


def uvicorn_config(app: ASGIApp, limits: LimitsConfig, **options: Any) -> uvicorn.Config:
    """For a server with `limits`; `options` are uvicorn's own."""
    return uvicorn.Config(
        app,
        http=cast(
            type[asyncio.Protocol],
            partial(
                LimitedConnection,
                limits=limits,
                waiting=Waiting(limits.max_connections),
                turns=Turns(),
            ),
        ),
        ws="none",
        timeout_keep_alive=limits.idle_timeout,
        access_log=False,  # every request has its own line
        log_config=None,  # uvicorn logs where we do
        server_header=False,
        proxy_headers=False,
        backlog=ACCEPTED_AT_ONCE,
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


class Waiting:
    """Connections without a request: idle ones, and those that wait for a head, by address."""

    def __init__(self, max_connections: int) -> None:
        self._share = max(1, max_connections // SHARES)
        self._idle: dict[LimitedConnection, None] = {}
        self._by_address: dict[str, dict[LimitedConnection, None]] = {}

    def add(self, address: str, connection: LimitedConnection, *, idle: bool) -> None:
        self.discard(address, connection, idle=not idle)
        those = self._idle if idle else self._by_address.setdefault(address, {})
        those.setdefault(connection)

    def discard(self, address: str, connection: LimitedConnection, *, idle: bool) -> None:
        if idle:
            self._idle.pop(connection, None)
        elif (those := self._by_address.get(address)) is not None:
            those.pop(connection, None)
            if not those:
                del self._by_address[address]

    def first(self) -> LimitedConnection | None:
        """Which to close for a new one: the one that waits longest, if one may be closed."""
        most = max(self._by_address.values(), key=len, default={})
        return next(iter(self._idle or (most if len(most) > self._share else ())), None)


class Turns:
    """Connections that have more to parse or to receive of a body: one has its turn, then what
    else waits, for a millisecond or as long as the turn took."""

    def __init__(self) -> None:
        self._queue: deque[LimitedConnection] = deque()
        self._is_running = False

    def append(self, connection: LimitedConnection) -> None:
        self._queue.append(connection)
        if not self._is_running:
            self._is_running = True
            connection.loop.call_soon(self._run_one)

    def _run_one(self) -> None:
        connection = self._queue.popleft()
        loop = connection.loop
        began = loop.time()
        connection.take_turn()
        self._is_running = bool(self._queue)
        if self._is_running:
            loop.call_later(max(PAUSE_S, loop.time() - began), self._run_one)


class LimitedConnection(H11Protocol):
    def __init__(
        self, *args: Any, limits: LimitsConfig, waiting: Waiting, turns: Turns, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.conn: ChunkLimits = ChunkLimits()
        self.flow: _Flow
        self.app = _with_chunks(self.app, self)
        self._limits = limits
        self._waiting = waiting
        self._turns = turns
        self._address = ""
        self._head_timer = _Timer(self.loop, limits.header_timeout)
        self._stall_timer = _Timer(self.loop, limits.send_timeout)
        self._num_received = 0
        self._discards = False  # what arrives: the reply was the last
        self._waits = False  # for its turn
        self._is_surplus = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # of asyncio's; there is no option
        self._address = network_of(self.client[0]) if self.client else ""
        surplus = len(self.connections) - self._limits.max_connections
        if surplus > 0:
            if (other := self._waiting.first()) is not None:
                other.make_room()
            else:
                self.app, self._is_surplus = _refusing_app(self._limits), True
                if surplus > NUM_REFUSED:
                    transport.abort()
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.stop()
        self._stall_timer.stop()
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if len(data) >= READ_BYTES:
            self._wait()
        if self._discards:
            return
        self._num_received += len(data)
        self._unset_keepalive_if_required()
        self.conn.receive_data(data)
        if self.conn.num_left or not self._waits:
            self._parse()
        self._expect_head()

    def handle_events(self) -> None:
        self.conn.num_left = CHUNKS_A_TURN
        super().handle_events()

    def _parse(self) -> None:
        """Of what was received. The rest waits, and nothing is received until it was parsed."""
        self.handle_events()
        if self.conn.num_left == 0:
            self._wait()
        self.flow.hold(self._waits or self.conn.is_held)

    def _wait(self) -> None:
        self.flow.hold(True)
        if not self._waits:
            self._waits = True
            self._turns.append(self)

    def take_turn(self) -> None:
        self._waits = False
        if self._discards:
            self.flow.hold(False)
        elif not self.transport.is_closing():
            self._parse()

    def ask_for_body(self) -> None:
        if self.conn.is_held:
            self.conn.is_held = False
            if not self._waits:
                self._parse()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._num_received = 0
        if self.conn.has_unread_chunks and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._discard()
        self._expect_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer.start(self.transport.abort)

    def resume_writing(self) -> None:
        self._stall_timer.stop()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            self._refuse(
                PippinError(
                    "the head of the request is larger than 16 KiB", code="request_head_too_large"
                )
            )
        elif isinstance(error, Unaccepted):
            self._refuse(RequestError(str(error)))
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
            self._stop_waiting()
            return
        idle = self.timeout_keep_alive_task is not None
        if not self._is_surplus:
            self._waiting.add(self._address, self, idle=idle)
        if not idle:
            self._head_timer.start(self._head_is_late)

    def _stop_waiting(self) -> None:
        for idle in (True, False):
            self._waiting.discard(self._address, self, idle=idle)

    def _head_is_late(self) -> None:
        limit = f"{self._limits.header_timeout:g} s (--header-timeout)"
        self._end(
            PippinError(
                f"the head of the request did not arrive within {limit}", code="request_too_slow"
            )
        )

    def make_room(self) -> None:
        """For another connection."""
        self._stop_waiting()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_handler()
        else:
            self._end(_too_many(self._limits))
            self.transport.close()  # without lingering, in which it would be one too many

    def _end(self, error: PippinError) -> None:
        """Close; a client that has sent a part of a head gets the error."""
        if self._num_received and self.conn.our_state is h11.IDLE:
            self._refuse(error)
        else:
            self.transport.close()

    def _refuse(self, error: PippinError) -> None:
        """Answer without the app and close; if a reply has started, close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        if self.cycle is not None:  # the app waits for the rest of a body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = msgspec.json.encode(error_body(error))
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        if error.retry_after_s is not None:
            headers.append(("retry-after", str(error.retry_after_s)))
        head = h11.Response(status_code=error.status, headers=headers)
        for event in (head, h11.Data(body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._discard()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _discard(self) -> None:
        """Closing at once, with unread bytes of the client's, could discard the reply."""
        self._discards = True
        self.flow.hold(self._waits)
        self.transport.write_eof()


class Unaccepted(h11.RemoteProtocolError):
    """HTTP that this server does not accept."""


class ChunkLimits(h11.Connection):
    """h11's parser. It parses no chunks before they are asked for, `num_left` of them at a time,
    and refuses a body of which too much is framing."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.is_held = False  # the request is known, and nothing has asked for its body
        self.num_left = 0
        self.is_chunked = False
        self._num_received = 0  # bytes of the body as it was sent
        self._num_data = 0  # bytes of the body

    @property
    def has_unread_chunks(self) -> bool:
        return self.is_chunked and self.their_state is h11.SEND_BODY

    def receive_data(self, data: bytes) -> None:
        self._num_received += len(data)
        super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.has_unread_chunks and self.is_held:
            return h11.NEED_DATA
        event = super().next_event() if self.num_left else h11.NEED_DATA
        if isinstance(event, h11.Request):
            self._start(event)
        elif self.is_chunked and isinstance(event, h11.Data):
            self.num_left -= 1
            self._num_data += len(event.data)
        elif self.has_unread_chunks and event is h11.NEED_DATA:
            self._check_framing()
        return event

    def send(self, event: h11.Event) -> Any:  # None of h11.ConnectionClosed, of others bytes
        sent = super().send(event)
        if sent is None or not isinstance(event, h11.Response) or not self.has_unread_chunks:
            return sent
        if any(name == b"connection" for name, _ in event.headers):
            return sent
        # Unknown to h11, with which uvicorn would close before the client has read the reply.
        return sent.removesuffix(b"\r\n") + b"connection: close\r\n\r\n"

    def _start(self, request: h11.Request) -> None:
        names = {name for name, _ in request.headers}
        self.is_held = self.is_chunked = b"transfer-encoding" in names
        if not self.is_chunked:
            return
        if b"content-length" in names:  # a proxy may go by the other one: RFC 9112, 6.1
            raise Unaccepted(
                "the request has Content-Length and Transfer-Encoding; it must have one of them"
            )
        self._num_data = 0
        self._num_received = len(self.trailing_data[0])

    def _check_framing(self) -> None:
        framing = self._num_received - len(self.trailing_data[0]) - self._num_data
        most = FREE_FRAMING_BYTES + self._num_data // BODY_BYTES_PER_FRAMING_BYTE
        if framing > most:
            raise Unaccepted(
                f"the chunks of the body have {framing:,} bytes of framing for {self._num_data:,} "
                f"bytes of data; at most {most:,} are allowed: send larger chunks"
            )


def _with_chunks(app: ASGIApp, connection: LimitedConnection) -> ASGIApp:
    """An app that may write chunks, and whose body's chunks are parsed once it asks for them."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_body() -> Message:
            connection.ask_for_body()
            return await receive()

        if scope["type"] == "http" and scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope["extensions"] = {EXTENSION: ChunkWriter(connection)}
        await app(scope, receive_body if connection.conn.is_held else receive, send)

    return call


class _Flow(FlowControl):
    """Reads nothing while it is held, also where the app asks for more, and the other way round."""

    _is_held = _is_full = False

    def hold(self, is_held: bool) -> None:
        self._is_held = is_held
        self._apply()

    def pause_reading(self) -> None:
        self._is_full = True
        self._apply()

    def resume_reading(self) -> None:
        self._is_full = False
        self._apply()

    def _apply(self) -> None:
        if self._is_held or self._is_full:
            super().pause_reading()
        else:
            super().resume_reading()


def _refusing_app(limits: LimitsConfig) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = ErrorResponse(_too_many(limits))
        response.headers["connection"] = "close"
        await response(scope, receive, send)

    return RequestLog(app)


def _too_many(limits: LimitsConfig) -> PippinError:
    return PippinError(
        f"{limits.max_connections:,} connections are open, and no more are allowed "
        "(--max-connections); try again later",
        code="too_many_connections",
    )


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
