"""Streams: headers at once, signs of life, errors before and after them, and their chunks."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import anthropic
import httpx
import openai
import pytest
from scripted_engine import (
    TOKENIZER,
    Script,
    ScriptedEngine,
    fail,
    hang,
    say,
    say_tokens,
    serving,
    serving_alone,
)

from pippin.api.dialects.messages import MessagesDialect
from pippin.api.http import sending
from pippin.api.http import sending as heartbeats
from pippin.config import LimitsConfig
from pippin.messages import Submit, TokenDelta
from processes import PATIENCE_SECONDS

STREAM = {
    "model": "stories",
    "messages": [{"role": "user", "content": "Hi."}],
    "stream": True,
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "GRACE_SECONDS", 0.01)
    monkeypatch.setattr(heartbeats, "HEARTBEAT_SECONDS", 0.02)


@pytest.mark.usefixtures("impatient")
def test_headers_do_not_wait_for_the_first_token_and_comments_follow() -> None:
    with (
        serving(ScriptedEngine(hang())) as url,
        httpx.stream("POST", f"{url}/v1/chat/completions", json=STREAM) as reply,
    ):
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        assert [next(lines) for _ in range(4)] == [": still here", "", ": still here", ""]


@pytest.mark.usefixtures("impatient")
def test_messages_start_and_are_pinged_while_the_prompt_is_computed() -> None:
    asked = {**STREAM, "max_tokens": 9, "timeout": 0.2}
    with (
        serving(ScriptedEngine(hang())) as url,
        httpx.stream("POST", f"{url}/v1/messages", json=asked) as reply,
    ):
        events = [line for line in reply.iter_lines() if not line.startswith("data: ")]
    named = [event for event in events if event]
    assert named[:3] == ["event: message_start", "event: ping", "event: ping"]
    assert set(named[1:-1]) == {"event: ping"}
    assert named[-1] == "event: error"


class WaitsForPing(ScriptedEngine):
    """Computes a prompt until a ping has been sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *scripts: Script) -> None:
        super().__init__(*scripts)
        self._pinged = asyncio.Event()
        ping = MessagesDialect.ping

        def noted(dialect: MessagesDialect) -> bytes:
            self._pinged.set()
            return ping(dialect)

        monkeypatch.setattr(MessagesDialect, "ping", noted)

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        await self._pinged.wait()
        async for delta in super().generate(submit):
            yield delta


@pytest.mark.usefixtures("impatient")
def test_a_message_that_was_pinged_is_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving(WaitsForPing(monkeypatch, say("Once upon"))) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client,
        client.messages.stream(model="stories", messages=STREAM["messages"], max_tokens=9) as got,
    ):
        kinds = [event.type for event in got]
        assert got.get_final_text() == "Once upon"
    assert kinds[:2] == ["message_start", "content_block_start"]  # the client skips pings
    assert kinds.count("message_start") == 1


@pytest.mark.usefixtures("impatient")
def test_comments_come_between_tokens_too_and_clients_do_not_mind() -> None:
    with (
        serving(ScriptedEngine(hang(after="Once"))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(**STREAM, extra_body={"timeout": 0.2})
        with pytest.raises(openai.APIError, match=r"after 0\.2 s"):
            for _ in stream:
                pass


def test_a_refusal_that_comes_at_once_is_a_status_with_a_time_to_retry() -> None:
    engine = ScriptedEngine(fail("the queue is full"))
    with serving(engine) as url:
        reply = httpx.post(f"{url}/v1/chat/completions", json=STREAM)
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"


def test_an_error_after_the_headers_is_one_event() -> None:
    with serving(ScriptedEngine(fail("the device failed", after="Once"))) as url:
        reply = httpx.post(f"{url}/v1/chat/completions", json=STREAM)
    assert reply.status_code == 200
    *_, error, done = reply.text.strip().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "the device failed"
    assert done == "data: [DONE]"


def test_a_bug_after_the_headers_is_one_event_that_tells_nothing_secret() -> None:
    def broken(submit: Any) -> Any:
        yield from hang(after="Once")(submit)
        raise KeyError("secret")

    with serving(ScriptedEngine(broken)) as url:
        reply = httpx.post(f"{url}/v1/chat/completions", json=STREAM)
    *_, error, done = reply.text.strip().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert "secret" not in reply.text
    assert done == "data: [DONE]"


def test_a_fast_reply_has_no_comments() -> None:
    with serving(ScriptedEngine(say("Hi."))) as url:
        reply = httpx.post(f"{url}/v1/chat/completions", json=STREAM)
    assert all(event.startswith("data: ") for event in reply.text.strip().split("\n\n"))


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
