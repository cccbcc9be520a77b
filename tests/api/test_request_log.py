"""Every request has an id and one line in the log."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest
from scripted_engine import TOKENIZER, ScriptedEngine, asking, fail, hang, say, serving

from pippin.config import ServerConfig
from processes import wait_until

CHAT = {"model": "stories", "messages": [{"role": "user", "content": "Sesame."}]}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "pippin.requests")
    return caplog


def lines(log: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in log.records if hasattr(record, "fields")]


def ask(
    engine: ScriptedEngine, config: ServerConfig | None = None, **options: Any
) -> httpx.Response:
    with serving(engine, config) as url:
        return httpx.post(f"{url}/v1/chat/completions", json=CHAT | options)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_is_one_line_with_its_tokens_and_times(
    log: pytest.LogCaptureFixture, stream: bool
) -> None:
    engine = ScriptedEngine(say("Once upon a time."))
    reply = ask(engine, stream=stream)
    wait_until(lambda: lines(log))
    [line] = lines(log)
    assert line["id"] == reply.headers["x-request-id"]
    assert (line["method"], line["path"]) == ("POST", "/v1/chat/completions")
    assert (line["status"], line["finish"]) == (200, "stop")
    assert line["prompt_tokens"] == engine.submits[0].prompt_len
    assert line["completion_tokens"] == len(TOKENIZER.encode("Once upon a time.")) + 1
    assert line["cached_tokens"] == 3
    assert 0 < line["ttft_s"] <= line["seconds"]
    assert line["queue_s"] == 0.25
    assert line["tokens_per_s"] > 0


def test_prompts_are_logged_only_on_request(log: pytest.LogCaptureFixture) -> None:
    ask(ScriptedEngine(say("Hi.")))
    wait_until(lambda: len(lines(log)) == 1)
    assert "Sesame" not in str(lines(log))
    ask(ScriptedEngine(say("Hi.")), ServerConfig(log_prompts=True))
    wait_until(lambda: len(lines(log)) == 2)
    assert "Sesame." in lines(log)[1]["prompts"][0]


@pytest.mark.parametrize(
    ("engine", "options", "status", "error"),
    [
        (ScriptedEngine(say("Hi.")), {"model": "gpt-4"}, 404, "model_not_found"),
        (ScriptedEngine(fail("full")), {}, 503, "overloaded"),
        (ScriptedEngine(fail("full", after="Once")), {"stream": True}, 200, "overloaded"),
    ],
)
def test_an_error_is_named(
    log: pytest.LogCaptureFixture,
    engine: ScriptedEngine,
    options: dict[str, Any],
    status: int,
    error: str,
) -> None:
    ask(engine, **options)
    wait_until(lambda: lines(log))
    [line] = lines(log)
    assert (line["status"], line["error"]) == (status, error)


def test_a_client_that_leaves_has_a_line(log: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(hang())
    with serving(engine) as url:
        with asking(f"{url}/v1/chat/completions", CHAT):
            wait_until(lambda: engine.submits)
        wait_until(lambda: lines(log))
    [line] = lines(log)
    assert (line["status"], line["finish"]) == (499, "cut")


def test_a_bug_is_logged_with_the_id_of_its_request(log: pytest.LogCaptureFixture) -> None:
    def broken(submit: object) -> Any:
        raise KeyError("a bug")

    reply = ask(ScriptedEngine(broken))
    wait_until(lambda: lines(log))
    [told] = [record for record in log.records if record.exc_info]
    assert reply.headers["x-request-id"] in told.getMessage()
    assert "a bug" in log.text
    assert lines(log)[0]["error"] == "internal_error"


def test_a_probe_has_no_line_unless_it_fails(log: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()
    with serving(engine) as url:
        assert httpx.get(f"{url}/health").headers["x-request-id"].startswith("req_")
        engine.reason = "gone"
        httpx.get(f"{url}/health")
        wait_until(lambda: lines(log))
    assert [line["status"] for line in lines(log)] == [503]


@pytest.mark.parametrize(
    ("given", "kept"), [("abc-1", True), ("a" * 128, True), ("a" * 129, False), ("a b", False)]
)
def test_a_clients_own_id_is_kept_if_it_can_be(given: str, kept: bool) -> None:
    with serving(ScriptedEngine()) as url:
        reply = httpx.get(f"{url}/v1/models", headers={"x-request-id": given})
    assert (reply.headers["x-request-id"] == given) == kept


def test_errors_carry_the_id_too() -> None:
    with serving(ScriptedEngine()) as url:
        for path in ("/nothing", "/v1/models/gpt-4"):
            assert httpx.get(url + path).headers["x-request-id"]
        refused = httpx.get(url, headers={"host": "evil.example"})
        assert refused.headers["x-request-id"]
