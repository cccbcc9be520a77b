"""Streams over raw sockets: their chunks, HTTP/1.0, and readers that are behind."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest
from scripted_engine import TOKENIZER, ScriptedEngine, say, say_tokens, serving_alone

from pippin.config import LimitsConfig
from processes import PATIENCE_SECONDS

# What JSON escapes, what UTF-8 writes in several bytes, and what looks like an event's end.
TEXT = 'Once "upon" a\\time,\n\ndata: \u263a {"a": [1]} the end.'
ASKED = {
    "/v1/completions": {"prompt": "Hi."},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi."}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 99},
    "/v1/responses": {"input": "Hi."},
    "/api/chat": {"messages": [{"role": "user", "content": "Hi."}]},
}


@contextmanager
def connected(engine: ScriptedEngine) -> Iterator[HTTPConnection]:
    with serving_alone(engine, LimitsConfig()) as (host, port):
        connection = HTTPConnection(host, port, timeout=PATIENCE_SECONDS)
        try:
            yield connection
        finally:
            connection.close()


def ask(connection: HTTPConnection, path: str, **fields: Any) -> HTTPResponse:
    body = {"model": "stories", "stream": True, **ASKED[path], **fields}
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def text_in(path: str, body: bytes) -> str:
    """The reply's text, of any dialect's deltas."""
    lines = body.decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))]
    found = ""
    for event in map(json.loads, data):
        match path:
            case "/v1/completions":
                found += "".join(choice["text"] for choice in event["choices"])
            case "/v1/chat/completions":
                found += "".join(c["delta"].get("content") or "" for c in event["choices"])
            case "/v1/messages" if event["type"] == "content_block_delta":
                found += event["delta"]["text"]
            case "/v1/responses" if event["type"] == "response.output_text.delta":
                found += event["delta"]
            case "/api/chat":
                found += event["message"]["content"]
    return found


@pytest.mark.parametrize("path", ASKED)
def test_streams_are_chunks_and_their_connection_is_used_again(path: str) -> None:
    with connected(ScriptedEngine(say(TEXT))) as connection:
        for _ in range(2):
            reply = ask(connection, path)
            assert reply.headers["transfer-encoding"] == "chunked"
            assert text_in(path, reply.read()) == TEXT


def test_events_of_responses_are_numbered_in_order() -> None:
    with connected(ScriptedEngine(say(TEXT))) as connection:
        body = ask(connection, "/v1/responses").read().decode()
    lines = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    numbers = [json.loads(line)["sequence_number"] for line in lines]
    assert numbers == list(range(len(lines)))


def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    with connected(ScriptedEngine(say(TEXT))) as connection:
        connection._http_vsn, connection._http_vsn_str = 10, "HTTP/1.0"  # type: ignore[attr-defined]
        reply = ask(connection, "/v1/completions")
        assert reply.headers["transfer-encoding"] is None
        body = reply.read()
    assert text_in("/v1/completions", body) == TEXT
    assert body.endswith(b"data: [DONE]\n\n")


def test_a_reader_that_is_behind_gets_everything_in_the_end() -> None:
    num_tokens = 4000  # more than sockets and the connection buffer
    token = TOKENIZER.encode("fox")[0]
    engine = ScriptedEngine(say_tokens([token] * num_tokens))
    with connected(engine) as connection:
        connection.connect()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        reply = ask(connection, "/v1/completions", logprobs=5, max_tokens=num_tokens)
        body = reply.read()
    lines = [line[6:] for line in body.splitlines() if line.startswith(b"data: {")]
    scored = [
        each for line in lines for each in json.loads(line)["choices"][0]["logprobs"]["tokens"]
    ]
    assert len(scored) == num_tokens
    assert body.endswith(b"data: [DONE]\n\n")
