"""Streams: headers at once, signs of life, and errors before and after them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from scripted_engine import Script, ScriptedEngine, fail, hang, say, serving

from pippin.api.dialects.messages import MessagesDialect
from pippin.api.http import sending
from pippin.api.http import sending as heartbeats
from pippin.messages import Submit, TokenDelta

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
