"""What one client may ask for: each limit is a 4xx that names it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine, hang, say, serving

from cases import cases
from pippin.api.endpoints import app_state
from pippin.api.http import read_body, sending
from pippin.config import LimitsConfig
from processes import wait_until

CHAT = {"model": "stories", "messages": [{"role": "user", "content": "Hi."}]}
COMPLETION = {"model": "stories", "prompt": "Hi."}
JSON = {"content-type": "application/json"}
SMALL = LimitsConfig(
    max_body_bytes=2000,
    max_choices=6,
    max_tokens=50,
    max_stops=2,
    max_logit_bias=3,
    max_schema_bytes=40,
)


def post(
    body: Any,
    limits: LimitsConfig = SMALL,
    *,
    path: str = "/v1/completions",
    engine: ScriptedEngine | None = None,
) -> httpx.Response:
    with serving(engine or ScriptedEngine(say("Hi.")), limits=limits) as url:
        return httpx.post(url + path, json=body)


@cases(
    ("fields", "param", "option"),
    [
        ({"prompt": ["a"] * 3, "n": 3}, "prompt", "--max-choices"),
        ({"prompt": ["a"] * 7}, "prompt", "--max-choices"),
        ({"n": 7}, "n", "--max-choices"),
        ({"max_tokens": 51}, "max_tokens", "--max-tokens"),
        ({"stop": ["a", "b", "c"]}, "stop", "--max-stops"),
        ({"logit_bias": {str(i): 1 for i in range(4)}}, "logit_bias", "--max-logit-bias"),
        ({"regex": "a" * 41}, "regex", "--max-schema-bytes"),
        ({"json_schema": {"enum": ["a" * 40]}}, "json_schema", "--max-schema-bytes"),
    ],
)
def test_a_request_for_more_names_the_limit(
    fields: dict[str, Any], param: str, option: str
) -> None:
    reply = post(COMPLETION | fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert option in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a"] * 3, "n": 2},
        {"max_tokens": 50},
        {"stop": ["a", "b"]},
        {"logit_bias": {str(i): 1 for i in range(3)}},
        {"regex": "a" * 40},
    ],
)
def test_a_request_for_as_much_is_served(fields: dict[str, Any]) -> None:
    assert post(COMPLETION | fields).status_code == 200


def test_a_request_that_names_no_length_gets_what_is_allowed() -> None:
    engine = ScriptedEngine(say("Hi."))
    post(COMPLETION, engine=engine)
    post(COMPLETION, LimitsConfig(), engine=engine)
    assert [submit.params.max_tokens for submit in engine.submits] == [50, 8190]


def in_pieces(body: bytes) -> Iterator[bytes]:
    yield from (body[i : i + 500] for i in range(0, len(body), 500))


@pytest.mark.parametrize("chunked", [False, True], ids=["declared", "chunked"])
def test_a_large_body_is_a_413(chunked: bool) -> None:
    body = json.dumps(COMPLETION | {"prompt": "x" * 5000}).encode()
    engine = ScriptedEngine(say("Hi."))
    with serving(engine, limits=SMALL) as url:
        content = in_pieces(body) if chunked else body
        reply = httpx.post(f"{url}/v1/completions", content=content, headers=JSON)
        assert reply.status_code == 413
        assert "2,000 bytes are allowed (--max-body-bytes)" in reply.json()["error"]["message"]
        assert httpx.post(f"{url}/v1/completions", json=COMPLETION).status_code == 200
        body = json.dumps(COMPLETION).encode()
        reply = httpx.post(f"{url}/v1/completions", content=in_pieces(body), headers=JSON)
        assert reply.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["field", "option"])
def test_a_reply_that_is_late_ends_and_is_aborted(
    monkeypatch: pytest.MonkeyPatch, stream: bool, by: str
) -> None:
    monkeypatch.setattr(sending, "GRACE_SECONDS", 60.0)  # so that it is a status in any case
    engine = ScriptedEngine(hang())
    limits = replace(SMALL, request_timeout=0.05 if by == "option" else 100.0)
    body = CHAT | {"stream": stream} | ({"timeout": 0.05} if by == "field" else {})
    reply = post(body, limits, path="/v1/chat/completions", engine=engine)
    assert reply.status_code == 408
    assert reply.json()["error"]["code"] == "deadline_passed"
    assert reply.headers["x-should-retry"] == "false"
    assert engine.aborted == [submit.id for submit in engine.submits]


def test_a_stream_that_is_late_says_so_in_an_event() -> None:
    engine = ScriptedEngine(hang(after="Once"))
    reply = post(
        CHAT | {"stream": True, "timeout": 2.0}, path="/v1/chat/completions", engine=engine
    )
    assert reply.status_code == 200
    *_, error, done = reply.text.strip().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_passed"
    assert done == "data: [DONE]"
    wait_until(lambda: engine.aborted)


@pytest.mark.parametrize("timeout", [0, -1, "5", True])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    reply = post(COMPLETION | {"timeout": timeout})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "timeout")


def test_large_bodies_are_prepared_in_a_thread_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app_state, "SMALL_BYTES", 20)
    monkeypatch.setattr(read_body, "LARGE_BYTES", 200)
    names: list[str] = []

    def decode_body(body: bytes) -> Any:
        names.append(threading.current_thread().name)
        return json.loads(body)

    monkeypatch.setattr(app_state, "decode_body", decode_body)
    assert post(COMPLETION).status_code == 200
    assert post(COMPLETION | {"prompt": "x" * 300}).status_code == 200
    small, large = names
    assert small.startswith("prepare_")
    assert large.startswith("prepare-large_")
