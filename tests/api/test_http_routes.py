"""Routes, errors, keys, the feed and clients that leave, over real HTTP."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from scripted_engine import MODEL, TEXT, ScriptedEngine, asking, hang, say, serving

from cases import cases
from pippin.api.http.access_control import shows_prompts
from pippin.config import ServerConfig
from pippin.engine.engine_client import WatchEvent
from pippin.errors import EngineDead, ModelNotFound, PippinError
from processes import wait_until

JSON = {"content-type": "application/json"}
CHAT = {"model": "stories", "messages": [{"role": "user", "content": "Hi."}]}


def fetch(
    method: str, path: str, engine: ScriptedEngine | None = None, **options: Any
) -> httpx.Response:
    with serving(engine or ScriptedEngine(say("Hi."))) as url:
        return httpx.request(method, url + path, **options)


def assert_openai_error(response: httpx.Response, status: int, match: str) -> None:
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert match in error["message"]


@cases(
    ("method", "path", "body", "status", "match"),
    [
        ("GET", "/v1/nothing", None, 404, "/v1/nothing"),
        ("GET", "/v1/chat/completions", None, 405, "GET"),
        ("POST", "/v1/chat/completions", b"{", 400, "not valid JSON"),
        ("POST", "/v1/chat/completions", b"\xff", 400, "not valid JSON"),
        ("POST", "/v1/chat/completions", b'"\\ud83d"', 400, r"has \ud800 to \udfff unpaired"),
        ("POST", "/v1/chat/completions", b'["\\uDE00 a"]', 400, r"has \ud800 to \udfff unpaired"),
        ("POST", "/v1/chat/completions", b'["\\ud83d\\ude00"', 400, "truncated"),
        ("POST", "/v1/chat/completions", b"[" * 100_000, 400, "levels deep"),
        ("POST", "/v1/chat/completions", b"[]", 400, "must be a JSON object"),
        ("POST", "/v1/completions", b"{}", 400, "prompt is required"),
        ("GET", "/v1/models/gpt-4", None, 404, "gpt-4"),
    ],
)
def test_every_error_has_the_openai_shape(
    method: str, path: str, body: bytes | None, status: int, match: str
) -> None:
    assert_openai_error(fetch(method, path, content=body, headers=JSON), status, match)


def test_a_compressed_body_is_refused_by_its_encoding() -> None:
    sent = gzip.compress(json.dumps(CHAT).encode())
    encoded = {**JSON, "content-encoding": "gzip"}
    response = fetch("POST", "/v1/chat/completions", content=sent, headers=encoded)
    assert_openai_error(response, 415, "Content-Encoding of the request is 'gzip'")
    plain = {**JSON, "content-encoding": "identity"}
    response = fetch("POST", "/v1/chat/completions", content=json.dumps(CHAT), headers=plain)
    assert response.status_code == 200


def test_a_bug_is_a_500_that_tells_nothing_secret() -> None:
    def broken(submit: object) -> Any:
        raise KeyError("secret")

    response = fetch("POST", "/v1/chat/completions", ScriptedEngine(broken), json=CHAT)
    assert_openai_error(response, 500, "log")
    assert "secret" not in response.text


def test_health_follows_the_engine() -> None:
    engine = ScriptedEngine(say("Hi."))
    assert fetch("GET", "/health", engine).json() == {"status": "ok"}
    engine.reason = "the engine was killed by signal 9"
    assert_openai_error(fetch("GET", "/health", engine), 503, "signal 9")


def test_whoever_is_not_taken_is_told_when_to_come_again() -> None:
    engine = ScriptedEngine(say("hello"))
    assert fetch("GET", "/ready", engine).json() == {"status": "ready"}
    engine.reason = "the engine was killed by signal 9"
    for method, path in (
        ("GET", "/ready"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
    ):
        refused = fetch(method, path, engine)
        assert_openai_error(refused, 503, "signal 9")
        assert refused.headers["retry-after"] == "5"
    assert engine.submits == []


def test_status_and_flush_ask_the_engine() -> None:
    assert fetch("GET", "/status").json() == {"running": 0}
    assert fetch("POST", "/flush_cache").json() == {"freed_bytes": 0}


@pytest.mark.parametrize(
    ("error", "status"), [(PippinError("no answer"), 500), (EngineDead("no answer"), 503)]
)
@pytest.mark.parametrize(
    ("method", "path", "call"),
    [("GET", "/status", "status"), ("POST", "/flush_cache", "flush_cache")],
)
def test_an_engine_that_does_not_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    call: str,
    error: PippinError,
    status: int,
) -> None:
    async def fail() -> None:
        raise error

    engine = ScriptedEngine()
    monkeypatch.setattr(engine, call, fail)
    assert_openai_error(fetch(method, path, engine), status, "no answer")


def test_the_model_answers_to_its_aliases() -> None:
    names = ["stories", "gpt-4o"]
    listed = fetch("GET", "/v1/models").json()["data"]
    assert [model["id"] for model in listed] == names
    for name in names:
        assert fetch("GET", f"/v1/models/{name}").json()["id"] == name
        reply = fetch("POST", "/v1/chat/completions", json=CHAT | {"model": name})
        assert reply.json()["model"] == "stories"
    refused = fetch("POST", "/v1/chat/completions", json=CHAT | {"model": "gpt-4"})
    assert_openai_error(refused, 404, '"stories", "gpt-4o"')


def test_the_id_of_a_checkpoint_is_accepted_and_a_star_accepts_any_name() -> None:
    ids = ("Qwen/Qwen3.5-0.8B", "Qwen3.5-0.8B")
    named = replace(MODEL, checkpoint_names=ids)
    assert named.names == ("stories", "gpt-4o")
    for name in (*named.names, *ids):
        named.check_name(name)
    with pytest.raises(ModelNotFound):
        named.check_name("Qwen/other")
    replace(MODEL, aliases=("*",)).check_name("anything/at all")
    assert replace(MODEL, aliases=("*",)).names == ("stories",)


@pytest.mark.parametrize("path", ["/chat/completions", "/models", "/models/stories"])
def test_a_path_may_lack_its_version(path: str) -> None:
    method, body = ("POST", CHAT) if path.startswith("/chat") else ("GET", None)
    assert fetch(method, path, json=body).status_code == 200
    assert fetch("GET", "/modelsx").status_code == 404


def test_the_last_event_is_done() -> None:
    response = fetch("POST", "/v1/chat/completions", json=CHAT | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.strip().split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"


def leave_a_stream_after_its_first_event(url: str, body: dict[str, Any]) -> None:
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        next(response.iter_lines())


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_a_stream_is_aborted_with_all_its_choices(n: int) -> None:
    engine = ScriptedEngine(hang(after="Once"))
    with serving(engine) as url:
        leave_a_stream_after_its_first_event(url, CHAT | {"stream": True, "n": n})
        wait_until(lambda: len(engine.aborted) == n)
    assert sorted(engine.aborted) == sorted(submit.id for submit in engine.submits)


@pytest.mark.parametrize(("stream", "said"), [(True, ""), (False, ""), (False, "Once")])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_before_anything_came_is_aborted_with_all_its_choices(
    stream: bool, said: str, n: int
) -> None:
    engine = ScriptedEngine(hang(after=said))
    with serving(engine) as url:
        with asking(f"{url}/v1/chat/completions", CHAT | {"stream": stream, "n": n}):
            wait_until(lambda: len(engine.submits) == n)
        wait_until(lambda: len(engine.aborted) == n)
    assert sorted(engine.aborted) == sorted(submit.id for submit in engine.submits)


def test_a_reply_that_ended_is_not_aborted() -> None:
    engine = ScriptedEngine(say("Hi."))
    assert fetch("POST", "/v1/chat/completions", engine, json=CHAT).status_code == 200
    assert fetch("POST", "/v1/chat/completions", engine, json=CHAT | {"stream": True}).text
    assert engine.aborted == []


def test_the_model_is_described_without_paths() -> None:
    info = fetch("GET", "/get_model_info").json()
    assert fetch("GET", "/model_info").json() == info
    assert info["model_path"] == info["served_model_name"] == "stories"
    assert info["is_generation"] is True
    assert info["max_model_len"] == MODEL.max_len


def test_replicas_are_restarted_on_request() -> None:
    engine = ScriptedEngine()
    response = fetch("POST", "/restart_replicas", engine)
    assert (response.status_code, response.json()) == (202, {"status": "restarting"})
    assert engine.num_restarts == 1


@cases("path", ["/events", "/events/node/1"])
@cases("given", ["x", "-1", "1.0", "", "99999", "١"])
def test_a_replica_is_given_by_its_number(path: str, given: str) -> None:
    refused = fetch("GET", f"{path}?replica={given}")
    assert_openai_error(refused, 400, "use a number, from 0 on")


def test_routers_read_where_kv_events_are_published() -> None:
    info = fetch("GET", "/server_info").json()
    assert fetch("GET", "/get_server_info").json() == info
    assert (info["served_model_name"], info["dp_size"]) == ("stories", 1)
    assert info["kv_events"] is None, "they are off by default"
    config = ServerConfig(kv_events="tcp://*:5557")
    with serving(ScriptedEngine(say("Hi.")), config) as url:
        events = httpx.get(f"{url}/server_info").json()["kv_events"]
    assert events["endpoint_host"] == "*"
    assert (events["endpoint_port_base"], events["block_size"]) == (5557, 64)
    assert events["topic"] == "kv-events"
    assert events["dp_size"] == 1
    config = ServerConfig(kv_events="tcp://*:5557", replicas=3)
    with serving(ScriptedEngine(say("Hi.")), config) as url:
        info = httpx.get(f"{url}/server_info").json()
    assert info["dp_size"] == info["kv_events"]["dp_size"] == 3


KEY = {"authorization": "Bearer secret"}
WATCHED = [WatchEvent("snapshot", b'{"number":3}'), WatchEvent("frame", b'{"number":4}')]


@contextmanager
def watched(config: ServerConfig | None = None) -> Iterator[str]:
    engine = ScriptedEngine()
    engine.events = WATCHED
    tokens = TEXT.tokenizer.encode("Once upon a time", add_special_tokens=False)
    engine.nodes = {7: {"start": 12, "num_tokens": 5000, "tokens": tokens}}
    with serving(engine, config) as url:
        yield url


def test_what_the_engine_wrote_is_sent_as_it_is() -> None:
    with watched() as url:
        reply = httpx.get(f"{url}/events")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (
        reply.text == 'event: snapshot\ndata: {"number":3}\n\nevent: frame\ndata: {"number":4}\n\n'
    )


@pytest.mark.parametrize("path", ["/events", "/events/node/7"])
def test_a_key_a_host_and_an_origin_are_checked_as_everywhere(path: str) -> None:
    with watched(ServerConfig(api_key=("secret",))) as url:
        assert httpx.get(url + path).status_code == 401
        assert httpx.get(url + path, headers=KEY).status_code == 200
        assert httpx.get(url + path, headers={"host": "evil.example"}).status_code == 403
        elsewhere = {"origin": "https://evil.example"}
        assert httpx.get(url + path, headers=KEY | elsewhere).status_code == 403


def test_the_text_of_a_node_is_told_on_its_own() -> None:
    with watched() as url:
        assert httpx.get(f"{url}/events/node/7").json() == {
            "id": 7,
            "start": 12,
            "tokens": 5000,
            "shown": len(TEXT.tokenizer.encode("Once upon a time", add_special_tokens=False)),
            "text": "Once upon a time",
        }
        assert httpx.get(f"{url}/events/node/8").status_code == 404
        assert httpx.get(f"{url}/events/node/x").status_code == 404


def test_text_that_may_be_somebody_elses_is_refused() -> None:
    with watched(ServerConfig(api_key=("another",), admin_key=("secret",))) as url:
        reply = httpx.get(f"{url}/events/node/7", headers=KEY)
        assert reply.status_code == 403
        assert "--show-prompts" in reply.json()["error"]["message"]
        assert httpx.get(f"{url}/events", headers=KEY).status_code == 200


def test_tokens_in_the_status_are_told_to_the_same_people() -> None:
    class Engine(ScriptedEngine):
        async def status(self) -> dict[str, Any]:
            paths = [{"tokens": 70, "first_tokens": [1], "last_tokens": [2]}]
            return {"cache": {"nodes": 1, "recent_paths": paths}}

    for config, told in ((ServerConfig(), 3), (ServerConfig(show_prompts="off"), 1)):
        with serving(Engine(), config) as url:
            [path] = httpx.get(f"{url}/status").json()["cache"]["recent_paths"]
        assert (path["tokens"], len(path)) == (70, told)


@cases(
    ("config", "expected"),
    [
        (ServerConfig(), True),
        (ServerConfig(api_key=("a",)), True),
        (ServerConfig(host="0.0.0.0", api_key=("a",)), True),
        (ServerConfig(api_key=("a", "b")), False),
        (ServerConfig(host="0.0.0.0"), False),
        (ServerConfig(show_prompts="off"), False),
        (ServerConfig(host="0.0.0.0", show_prompts="on"), True),
        (ServerConfig(api_key=("a", "b"), show_prompts="on"), True),
    ],
)
def test_prompts_are_shown_where_there_are_no_others(config: ServerConfig, expected: bool) -> None:
    assert shows_prompts(config) is expected
