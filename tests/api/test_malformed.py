"""Thousands of requests that make no sense: each gets a 2xx or a 4xx, and the server serves on.

By hypothesis, and by hand: types, sizes, nesting, numbers, encodings, and bodies that are cut,
split or not as long as they say; over raw sockets also what is no HTTP.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine, say, serving_alone

from pippin.api.dialects.chat_completions import CHAT as CHAT_TABLE
from pippin.api.dialects.chat_completions import COMPLETION as COMPLETION_TABLE
from pippin.api.requests.fields import FieldTable
from pippin.config import LimitsConfig
from processes import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "Hi."}
CHAT = {"model": "stories", "messages": [USER]}
COMPLETION = {"model": "stories", "prompt": "Hi."}
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
# Short, since a body that is said to be longer than it is has to be waited for; and long enough for
# whole requests on a machine that has much else to do.
LIMITS = LimitsConfig(body_timeout=3.0, header_timeout=3.0, max_body_bytes=1_000_000)

Address = tuple[str, int]


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    with serving_alone(ScriptedEngine(say("Hi.")), LIMITS) as address:
        yield address


@pytest.fixture(scope="module")
def client(address: Address) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{address[1]}") as client:
        yield client
        assert client.post(COMPLETION_PATH, json=COMPLETION).status_code == 200


def assert_is_an_answer(reply: httpx.Response) -> None:
    assert reply.status_code < 500, reply.text
    if reply.status_code >= 400:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def post(client: httpx.Client, path: str, body: bytes) -> httpx.Response:
    reply = client.post(path, content=body, headers=JSON)
    assert_is_an_answer(reply)
    return reply


ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**40), 10**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "refusal")
MESSAGE = st.dictionaries(st.sampled_from(MESSAGE_FIELDS), ANY_JSON, max_size=4)
STORM = settings(max_examples=250, suppress_health_check=list(HealthCheck))


def changed(table: FieldTable) -> st.SearchStrategy[dict[str, Any]]:
    names = sorted(table.fields)
    return st.dictionaries(st.sampled_from(names) | st.text(), ANY_JSON, min_size=1, max_size=4)


@STORM
@given(fields=changed(CHAT_TABLE))
def test_a_chat_with_any_fields(client: httpx.Client, fields: dict[str, Any]) -> None:
    post(client, CHAT_PATH, json.dumps(CHAT | fields).encode())


@STORM
@given(fields=changed(COMPLETION_TABLE))
def test_a_completion_with_any_fields(client: httpx.Client, fields: dict[str, Any]) -> None:
    post(client, COMPLETION_PATH, json.dumps(COMPLETION | fields).encode())


@STORM
@given(messages=st.lists(MESSAGE | ANY_JSON, max_size=3), variables=ANY_JSON)
def test_a_chat_with_any_messages(client: httpx.Client, messages: Any, variables: Any) -> None:
    body = CHAT | {"messages": messages, "chat_template_kwargs": variables}
    post(client, CHAT_PATH, json.dumps(body).encode())


@STORM
@given(body=st.binary(max_size=200))
def test_a_body_of_any_bytes(client: httpx.Client, body: bytes) -> None:
    assert post(client, CHAT_PATH, body).is_client_error


BY_HAND = [
    b"",
    b" ",
    b"null",
    b'"\xff\xfe"',
    b"\xef\xbb\xbf{}",  # a byte order mark
    b'{"model":"stories","messages":[{"role":"user","content":"\xed\xa0\x80"}]}',  # a surrogate
    b'{"model":"stories","messages":[{"role":"user","content":"\\ud800"}]}',
    b'{"model":"stories","messages":[{"role":"user","content":"\\u0000"}]}',
    b'{"model":"stories","model":"other","messages":[]}',
    b'{"model":"stories","messages":[{"role":"user","content":"Hi."}]} trailing',
    b'{"model":"stories","messages":[{"role":"user","content":"Hi."}]',
    json.dumps(CHAT).encode("utf-16"),
    json.dumps(CHAT | {"\x00": 1}).encode(),
    json.dumps(CHAT | {"stop": ["a"] * 10_000}).encode(),
    json.dumps(CHAT | {"logit_bias": {str(i): 1 for i in range(20_000)}}).encode(),
    json.dumps(CHAT | {"logit_bias": {"²": 1, "٣": 1}}).encode(),
    json.dumps(CHAT | {"messages": [USER] * 5000}).encode(),
    json.dumps(CHAT | {"metadata": {"a" * 1000: "b"}}).encode(),
    json.dumps(CHAT | {"model": "x" * 100_000}).encode(),
    json.dumps(CHAT | {"x" * 100_000: 1}).encode(),
    *(
        f'{{"model":"stories","prompt":"a","temperature":{number}}}'.encode()
        for number in ("NaN", "-Infinity", "1e999", "1" * 5000, "-0", "1e-400", "0x1", "01")
    ),
]


@pytest.mark.parametrize("body", BY_HAND, ids=lambda body: f"{len(body)} bytes")
def test_a_body_by_hand(client: httpx.Client, body: bytes) -> None:
    for path in (CHAT_PATH, COMPLETION_PATH):
        post(client, path, body)


@pytest.mark.parametrize(
    "path", ["/", "//", "/v1/../status", "/v1/models/%00", "/%ff", "/v1/models/" + "a" * 4000]
)
@pytest.mark.parametrize(
    "method", ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "X"]
)
def test_any_path_and_method(client: httpx.Client, method: str, path: str) -> None:
    reply = client.request(method, path)
    assert reply.status_code < 500


def test_a_flood_of_headers(client: httpx.Client) -> None:
    few = {f"x-{i}": "a" for i in range(100)}
    assert client.get("/health", headers=few).status_code == 200
    for name in ("host", "origin", "authorization", "content-type", "x-request-id", "expect"):
        for value in (b"", b"\xff" * 10, b"a" * 8000, b",;=\"'", b"%s%n", b"[::", b"http://[::"):
            assert_is_an_answer(client.get("/v1/models", headers={name: value}))


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GOOD = json.dumps(COMPLETION).encode()
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(GOOD) + GOOD + b"\r\n0\r\n\r\n"


def exchange(address: Address, sent: Sequence[bytes], *, cut: bool) -> list[bytes]:
    """What a server says to each of these; with `cut`, we say that no more will come.

    All at once, since for the rest of some it waits.
    """
    with ExitStack() as stack:
        clients = []
        for one in sent:
            client = socket.create_connection(address, timeout=PATIENCE_SECONDS)
            clients.append(stack.enter_context(closing(client)))
            with suppress(ConnectionError):
                client.sendall(one)
                if cut:
                    client.shutdown(socket.SHUT_WR)
        return [_head_of(client) for client in clients]


def _head_of(client: socket.socket) -> bytes:
    found = b""
    with suppress(ConnectionError):
        while b"\r\n\r\n" not in found and (piece := client.recv(65536)):
            found += piece
    return found


def assert_serves(address: Address) -> None:
    [reply] = exchange(address, [WHOLE], cut=False)
    assert reply[9:12] == b"200"


def mutants(request: bytes, number: int) -> Iterator[bytes]:
    """The request with some bytes lost, doubled, changed or added."""
    chance = random.Random(number)
    for _ in range(number):
        mutant = bytearray(request)
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(mutant))
            match chance.randrange(4):
                case 0:
                    del mutant[place : place + chance.randint(1, 20)]
                case 1:
                    mutant[place:place] = mutant[place : place + chance.randint(1, 20)]
                case 2:
                    mutant[place] = chance.randrange(256)
                case 3:
                    mutant[place:place] = chance.randbytes(chance.randint(1, 20))
            mutant = mutant or bytearray(b"\r\n")
        yield bytes(mutant)


@pytest.mark.parametrize("request_", [WHOLE, CHUNKED], ids=["whole", "chunked"])
def test_mutants_of_a_request_over_raw_sockets(address: Address, request_: bytes) -> None:
    sent = list(mutants(request_, 150))
    for request, reply in zip(sent, exchange(address, sent, cut=False), strict=True):
        assert not reply or reply[9:10] in (b"2", b"4"), (request, reply)
    assert_serves(address)


def test_requests_that_are_cut_anywhere(address: Address) -> None:
    sent = [WHOLE[:length] for length in range(0, len(WHOLE), 3)]
    for request, reply in zip(sent, exchange(address, sent, cut=True), strict=True):
        assert not reply or reply[9:10] == b"4", (request, reply)
    assert_serves(address)


WRONG_LENGTHS = (b"0", b"1", b"44", b"99999", b"999999999", b"9" * 30, b"-1", b"1e3", b"", b"0x10")


def test_lengths_that_are_wrong(address: Address) -> None:
    sent = [
        HEAD + b"Content-Length: " + length + b"\r\n\r\n" + GOOD
        for length in (*WRONG_LENGTHS, b"1, 2")
    ]
    for request, reply in zip(sent, exchange(address, sent, cut=False), strict=True):
        assert reply[9:10] == b"4", (request, reply)
    assert_serves(address)
