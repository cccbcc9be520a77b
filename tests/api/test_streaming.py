"""Streams: headers at once, signs of life, and errors before and after them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from scripted_engine import ScriptedEngine, fail, hang, say, serving

from pippin.api.http import sending

STREAM = {
    "model": "stories",
    "messages": [{"role": "user", "content": "Hi."}],
    "stream": True,
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "GRACE_SECONDS", 0.01)
    monkeypatch.setattr(sending, "HEARTBEAT_SECONDS", 0.02)


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
