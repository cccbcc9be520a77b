"""Half requests, slow bytes, too many connections and slow readers, over raw sockets."""

from __future__ import annotations

import json
import resource
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from scripted_engine import ScriptedEngine, hang, say, say_tokens, serving_alone

from pippin.api.http import limited_connection as connection
from pippin.api.http import read_body
from pippin.config import LimitsConfig, ServerConfig
from pippin.startup.launch import listen
from processes import PATIENCE_SECONDS, wait_until

BODY = json.dumps({"model": "stories", "prompt": "Hi."}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
REQUEST = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
# Long enough for whoever does send what it should, on a machine that has much else to do.
SOON_SECONDS = 2.0
LATE = LimitsConfig(header_timeout=600.0, body_timeout=600.0, send_timeout=600.0)
SOON = replace(LATE, header_timeout=SOON_SECONDS)

Connect = Callable[[], socket.socket]


@contextmanager
def server(
    limits: LimitsConfig,
    engine: ScriptedEngine | None = None,
    config: ServerConfig | None = None,
) -> Iterator[Connect]:
    """Yields what connects to it."""
    with ExitStack() as stack:
        address = stack.enter_context(
            serving_alone(engine or ScriptedEngine(say("Hi there.")), limits, config)
        )
        yield lambda: stack.enter_context(
            socket.create_connection(address, timeout=PATIENCE_SECONDS)
        )


@pytest.fixture(scope="module")
def connect() -> Iterator[Connect]:
    """To a server that has all the time there is, for the tests that need no other."""
    with server(LATE) as connect:
        yield connect


def all_of(client: socket.socket) -> bytes:
    """What comes until the server hangs up."""
    found = b""
    while piece := _read(client):
        found += piece
    return found


def _read(client: socket.socket) -> bytes:
    try:
        return client.recv(65536)
    except ConnectionResetError:
        return b""


def reply_of(client: socket.socket) -> tuple[int, dict[str, Any]]:
    """One whole reply: its status and its JSON."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += client.recv(65536)
    head, _, body = found.partition(b"\r\n\r\n")
    [length] = [int(line[15:]) for line in head.split(b"\r\n") if line[:15] == b"content-length:"]
    while len(body) < length:
        body += client.recv(65536)
    return int(head.split()[1]), json.loads(body)


def all_requested(client: socket.socket, number: int) -> bytes:
    """So many replies to pipelined requests, each with the same end."""
    found = b""
    while found.count(b'"usage"') < number:
        piece = client.recv(65536)
        assert piece, found
        found += piece
    return found


def assert_serves(connect: Connect) -> None:
    client = connect()
    client.sendall(REQUEST)
    assert reply_of(client)[0] == 200


def sending(connect: Connect, *each: bytes) -> list[socket.socket]:
    """Clients that wait at the same time."""
    clients = [connect() for _ in each]
    for client, sent in zip(clients, each, strict=True):
        client.sendall(sent)
    return clients


def test_a_head_that_does_not_come_is_a_408() -> None:
    with server(SOON) as connect:
        for client in sending(connect, b"P", HEAD, HEAD + b"X-More: a"):
            status, body = reply_of(client)
            assert status == 408
            assert "--header-timeout" in body["error"]["message"]
            assert all_of(client) == b""
        assert_serves(connect)


def test_time_is_neither_bought_by_slow_bytes_nor_kept_by_silence() -> None:
    with server(SOON) as connect:
        silent = connect()
        client = connect()
        found = b""
        client.settimeout(0.01)
        while not found:  # a byte of a header that never ends, each hundredth of a second
            client.sendall(b"P")
            with suppress(TimeoutError):
                found = client.recv(1000)
        assert b" 408 " in found
        assert all_of(silent) == b""


def test_a_second_request_has_its_own_time() -> None:
    with server(SOON) as connect:
        client = connect()
        for _ in range(2):
            client.sendall(REQUEST)
            assert reply_of(client)[0] == 200
        client.sendall(b"GET /health")
        assert reply_of(client)[0] == 408


def test_a_body_that_does_not_come_is_a_408() -> None:
    with server(replace(LATE, body_timeout=SOON_SECONDS)) as connect:
        cut = (HEAD + b"Content-Length: 100\r\n\r\n{", CHUNKED, CHUNKED + b"5\r\n{")
        for client in sending(connect, *cut):
            status, body = reply_of(client)
            assert status == 408
            assert "--body-timeout" in body["error"]["message"]
        assert_serves(connect)


def test_a_body_that_nobody_waits_for_does_not_keep_a_connection() -> None:
    with server(SOON) as connect:
        client = connect()
        client.sendall(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
        assert reply_of(client)[0] == 404
        client.sendall(b" ")
        assert all_of(client) == b""


def test_a_client_that_leaves_in_the_middle_of_its_body_harms_nobody(connect: Connect) -> None:
    client = connect()
    client.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
    client.close()
    assert_serves(connect)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS to a plain port
        (b"GET / HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"\r\n\r\n\r\nnonsense\r\n\r\n", 400),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400),
        (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{", 400),
        (HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 400),
        (CHUNKED + b"zz\r\n", 400),
        (CHUNKED + b"5\r\n{....garbage", 400),
        (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (CHUNKED + b"1\r\n \r\n" * 5_000, 400),
        (CHUNKED + b"0001;a=bcdefghijk\r\n \r\n" * 1_000, 400),
        (CHUNKED + b"1;" + b"a" * 15_000 + b"\r\n \r\n1;" + b"a" * 15_000 + b"\r\n \r\n", 400),
        (HEAD + b"X-Long: " + b"a" * 70_000, 431),
        (HEAD + b"".join(b"X-%d: a\r\n" % i for i in range(10_000)), 431),
        (HEAD + b"Bad Header: a\r\n\r\n", 400),
    ],
)
def test_what_is_not_http_is_answered_and_the_connection_closed(
    connect: Connect, sent: bytes, expected: int
) -> None:
    client = connect()
    client.sendall(sent)
    reply = all_of(client)
    assert reply.startswith(b"HTTP/1.1 %d " % expected)
    error = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
    assert error["type"] == "invalid_request_error"
    assert_serves(connect)


@pytest.mark.parametrize("nbytes", [1, 16, 500, 70_000])
def test_a_body_in_chunks_is_read_whole(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    monkeypatch.setattr(connection, "CHUNKS_A_TURN", 2)
    body = BODY + b" " * 50 * nbytes
    pieces = [body[at : at + nbytes] for at in range(0, len(body), nbytes)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    request = CHUNKED + chunks + b"0\r\n\r\n"
    for client in sending(connect, *[request + REQUEST] * 3):  # there is another one behind it
        replies = all_requested(client, 2)
        assert replies.count(b"HTTP/1.1 200 ") == 2


def test_large_bodies_take_turns_and_streams_get_time_between_them() -> None:
    events: list[str] = []

    class Loop:
        def time(self) -> float:
            return 0.0

        def call_soon(self, call: Callable[[], None]) -> None:
            self.next = call

        def call_later(self, seconds: float, call: Callable[[], None]) -> None:
            events.append(f"{seconds:g} s")
            self.next = call

    loop, turns = Loop(), connection.Turns()

    class Uploading:
        def __init__(self, name: str, num_turns: int) -> None:
            self.name, self.num_turns, self.loop = name, num_turns, loop
            turns.append(cast(Any, self))

        def take_turn(self) -> None:
            events.append(self.name)
            self.num_turns -= 1
            if self.num_turns:
                turns.append(cast(Any, self))

    Uploading("a", 3)
    Uploading("b", 1)
    for _ in range(4):
        loop.next()
    assert events == ["a", "0.001 s", "b", "0.001 s", "a", "0.001 s", "a"]


def test_a_body_that_nothing_consumes_is_not_read() -> None:
    transport = Mock()
    flow = connection._Flow(transport)
    flow.pause_reading()  # enough is buffered
    flow.hold(True)
    flow.hold(False)
    transport.resume_reading.assert_not_called()
    flow.resume_reading()
    transport.resume_reading.assert_called_once()


def test_chunks_of_a_request_without_a_key_are_not_parsed() -> None:
    config = ServerConfig(api_key=("secret",))
    for rest in (b"1\r\n \r\n" * 5_000, b"this is no chunk\r\n"):
        with server(LATE, config=config) as connect:
            client = connect()
            client.sendall(CHUNKED + rest)
            reply = all_of(client)
            assert reply.startswith(b"HTTP/1.1 401 ")
            assert b"connection: close\r\n" in reply


SMALL_BODIES = replace(LATE, max_body_bytes=1_000)  # one client's take half of 8,000
UNFINISHED = b"Content-Length: 1000\r\n\r\n" + b" " * 900


def test_all_unfinished_bodies_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_body, "MIN_BUDGET_BYTES", 0)
    with server(SMALL_BODIES) as connect:
        clients = sending(connect, *[HEAD + UNFINISHED] * 5)
        refused = select.select(clients, [], [], PATIENCE_SECONDS)[0]
        assert len(refused) == 1
        found = refused[0].recv(65536)
        assert found.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 1\r\n" in found
        for client in clients:
            client.close()
        for _ in range(2):
            wait_until(lambda: status_of(connect, b"") == 200)  # a body of 900 bytes has room


def test_a_client_leaves_room_for_the_bodies_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_body, "MIN_BUDGET_BYTES", 0)
    config = ServerConfig(api_key=("one", "two"))
    with server(SMALL_BODIES, config=config) as connect:
        one, two = (b"Authorization: Bearer %b\r\n" % key for key in (b"one", b"two"))
        clients = sending(connect, *[HEAD + one + UNFINISHED] * 5)
        select.select(clients, [], [], PATIENCE_SECONDS)
        assert status_of(connect, one) == 429
        assert status_of(connect, two) == 200


def status_of(connect: Connect, headers: bytes) -> int:
    """Of a request with a body of 900 bytes."""
    client = connect()
    client.sendall(HEAD + headers + b"Content-Length: 900\r\n\r\n" + BODY.ljust(900))
    return reply_of(client)[0]


def test_half_a_head_makes_room_where_its_address_has_many() -> None:
    with server(replace(LATE, max_connections=8)) as connect:
        *halves, idle = sending(connect, *[b"GET /health HT"] * 7, REQUEST)
        assert reply_of(idle)[0] == 200
        busy = [connect() for _ in range(2)]
        for client in busy:
            client.sendall(REQUEST)
            assert reply_of(client)[0] == 200
        assert all_of(idle) == b""
        reply = all_of(halves[0])
        assert reply.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 1\r\n" in reply


def test_too_many_connections_are_told_and_room_is_made_by_idle_ones() -> None:
    engine = ScriptedEngine(hang())
    with server(replace(LATE, max_connections=2), engine) as connect:
        busy, idle = connect(), connect()
        busy.sendall(REQUEST)
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert reply_of(idle)[0] == 200
        client = connect()  # takes the place of the idle one
        client.sendall(REQUEST)
        assert all_of(idle) == b""
        wait_until(lambda: len(engine.submits) == 2)
        surplus = connect()
        surplus.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        reply = all_of(surplus)
        assert b" 429 " in reply
        assert b"retry-after: 1\r\n" in reply
        assert b"--max-connections" in reply


def test_far_too_many_connections_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "NUM_REFUSED", 1)
    with server(replace(LATE, max_connections=1)) as connect:
        first, told, closed = connect(), connect(), connect()
        assert all_of(closed) == b""
        told.sendall(REQUEST)
        assert b" 429 " in all_of(told)
        first.sendall(REQUEST)
        assert reply_of(first)[0] == 200


def test_a_reader_that_takes_nothing_is_cut_off_and_aborted() -> None:
    engine = ScriptedEngine(say_tokens([5] * 8000))
    body = json.dumps({"model": "stories", "prompt": "Hi.", "stream": True, "logprobs": 20})
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body.encode()
    with server(replace(LATE, send_timeout=SOON_SECONDS), engine) as connect:
        client = connect()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(request)
        wait_until(lambda: engine.aborted)
        assert_serves(connect)


def test_pipelined_requests_are_answered_in_order(connect: Connect) -> None:
    client = connect()
    client.sendall(REQUEST + b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n")
    found = b""
    while b"/nothing" not in found:
        found += client.recv(65536)
    assert found.index(b" 200 ") < found.index(b" 404 ")


@pytest.mark.parametrize(("soft", "raised"), [(256, 1024 + 64 + 128), (4096, None)])
def test_enough_files_may_be_open(
    monkeypatch: pytest.MonkeyPatch, soft: int, raised: int | None
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: (soft, 5000))
    monkeypatch.setattr("resource.setrlimit", lambda _, limits: asked.append(limits))
    connection.allow_open_files(LimitsConfig())
    assert asked == ([] if raised is None else [(raised, 5000)])


def test_a_system_that_refuses_more_open_files_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """macOS reports no hard limit, and refuses what exceeds the kernel's."""

    def refuses(*_: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr("resource.getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr("resource.setrlimit", refuses)
    connection.allow_open_files(LimitsConfig(max_connections=20_000))
    assert "20000 need 20192 open files, and the system allows 256" in caplog.text


def test_the_servers_socket_is_one_that_asyncio_sends_small_pieces_on_at_once() -> None:
    """Else a token can wait for the acknowledgement of the last one: 40 ms."""
    with listen(ServerConfig(port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_an_offer_of_another_protocol_is_passed_over(connect: Connect) -> None:
    for offer in (b"h2c", b"websocket"):
        client = connect()
        head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
        client.sendall(head + b"Upgrade: " + offer + b"\r\n\r\n")
        assert reply_of(client)[0] == 200
