"""Ollama's API as it is on the wire: what its client hides, and what other clients send."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest
from scripted_engine import TOKENIZER, ScriptedEngine, answer_anything, hang, say, serving

from cases import cases
from pippin.api.http import sending
from pippin.api.http import sending as heartbeats
from pippin.config import ServerConfig

PIXEL = base64.b64encode(
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x01\0\0\0\x01\x08\x06\0\0\0"
).decode()
USER = {"role": "user", "content": "Hi."}
CHAT = {"model": "stories", "messages": [USER]}


def post(path: str, **fields: Any) -> httpx.Response:
    with serving(ScriptedEngine(say("Hello."))) as url:
        return httpx.post(f"{url}/api/{path}", json=fields)


def test_replies_are_streams_of_json_lines_unless_asked_otherwise() -> None:
    streamed = post("chat", **CHAT)
    assert streamed.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in streamed.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "Hello."
    whole = post("chat", **CHAT, stream=False)
    assert whole.headers["content-type"] == "application/json"
    assert whole.json()["message"] == {"role": "assistant", "content": "Hello."}


def test_a_stream_that_waits_is_kept_open_by_what_json_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(heartbeats, "HEARTBEAT_SECONDS", 0.01)
    with (
        serving(ScriptedEngine(hang())) as url,
        httpx.stream("POST", f"{url}/api/chat", json={**CHAT, "timeout": 0.5}) as reply,
    ):
        text = reply.read().decode()
    (line,) = text.splitlines()
    assert line.startswith(" ")
    assert "0.5 s" in json.loads(line)["error"]


@cases(
    ("path", "fields", "named"),
    [
        ("chat", {"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("chat", {"messages": [{"role": "user", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ("chat", {"messages": [USER] * 10_001}, "messages has 10,001"),
        ("chat", {"messages": [USER], "options": {"temperature": -1}}, "options.temperature"),
        ("chat", {"messages": [USER], "options": {"num_predict": "x"}}, "options.num_predict"),
        ("chat", {"messages": [USER], "options": {"stop": ["x" * 1025]}}, "options.stop"),
        ("chat", {"messages": [USER], "format": "xml"}, "format"),
        ("chat", {"messages": [USER], "think": "a lot"}, "think"),
        ("chat", {"messages": [USER], "top_logprobs": 2}, "top_logprobs needs logprobs"),
        ("generate", {"prompt": "a", "template": "b"}, "template"),
        ("generate", {"prompt": "a", "raw": True, "system": "b"}, "system"),
        ("generate", {"prompt": "a", "context": [[1]]}, "context"),
        ("generate", {"prompt": "a", "context": [1] * 8192}, "maximum context length"),
        ("embed", {}, "input is required"),
        ("embed", {"input": [""]}, "input[0] is empty"),
        ("embed", {"input": [[1, 2]]}, "input"),
        ("embeddings", {}, "prompt is required"),
    ],
)
def test_a_mistake_is_a_400_with_an_error_that_names_it(
    path: str, fields: dict[str, Any], named: str
) -> None:
    reply = post(path, model="stories", **fields)
    assert reply.status_code == 400
    assert list(reply.json()) == ["error"]
    assert reply.json()["error"].startswith(named) or named in reply.json()["error"]


def test_show_takes_the_older_name_of_the_model() -> None:
    assert post("show", name="stories:latest").status_code == 200
    assert post("show").json() == post("show", model="stories").json()


def test_other_paths_and_methods_have_ollamas_shape_of_errors() -> None:
    missing = post("create", model="a")
    assert (missing.status_code, list(missing.json())) == (404, ["error"])
    with serving(ScriptedEngine()) as url:
        wrong = httpx.get(f"{url}/api/chat")
    assert (wrong.status_code, list(wrong.json())) == (405, ["error"])


def test_what_cannot_change_a_reply_is_ignored_and_reported() -> None:
    fields = {
        "messages": [USER | {"timestamp": 5}],
        "keep_alive": "5m",
        "options": {"num_ctx": 2048, "mirostat": 1},
    }
    reply = post("chat", model="stories", **fields)
    assert reply.status_code == 200
    reported = reply.headers["x-pippin-ignored"].split(", ")
    names = ["keep_alive", "messages[].timestamp", "options.mirostat", "options.num_ctx"]
    assert sorted(reported) == names
    shown = post("show", model="stories", verbose=True)
    assert shown.headers["x-pippin-ignored"] == "verbose"
    loaded = post("generate", model="stories", keep_alive=0)
    assert loaded.headers["x-pippin-ignored"] == "keep_alive"
    with serving(ScriptedEngine(answer_anything)) as url:
        body = {"model": "stories", "input": "Hi.", "keep_alive": 0}
        embedded = httpx.post(f"{url}/api/embed", json=body)
    assert embedded.headers["x-pippin-ignored"] == "keep_alive"


def test_a_text_takes_the_place_of_an_image() -> None:
    engine = ScriptedEngine(say("Hello."))
    with serving(engine) as url:
        messages = [USER | {"images": [PIXEL]}]
        chat = httpx.post(f"{url}/api/chat", json={"model": "stories", "messages": messages})
        body = {"model": "stories", "prompt": "Hi.", "images": [PIXEL]}
        generated = httpx.post(f"{url}/api/generate", json=body)
    assert chat.headers["x-pippin-ignored"] == "messages[].images (image)"
    assert generated.headers["x-pippin-ignored"] == "images (image)"
    for submit in engine.submits:
        text = TOKENIZER.decode_with_special(submit.token_ids)
        assert "[image omitted]\nHi." in text
    with serving(engine, ServerConfig(images="refuse")) as url:
        refused = httpx.post(f"{url}/api/chat", json={"model": "stories", "messages": messages})
    assert refused.status_code == 400
    assert "--images refuse" in refused.json()["error"]


def test_options_that_ollama_does_not_know_are_ignored_and_reported() -> None:
    options = {"num_ctx": 4096, "draft_num_predict": 4, "temprature": 1}
    reply = post("chat", **CHAT, options=options)
    assert reply.status_code == 200
    assert reply.headers["x-pippin-ignored"] == (
        "options.draft_num_predict, options.temprature, options.num_ctx"
    )
    strict = ServerConfig(strict_fields=True)
    with serving(ScriptedEngine(say("Hello.")), strict) as url:
        reply = httpx.post(f"{url}/api/chat", json={**CHAT, "options": {"temprature": 1}})
    assert reply.status_code == 400
    assert "options.temprature is not supported" in reply.json()["error"]


def test_the_version_is_one_that_clients_accept() -> None:
    with serving(ScriptedEngine(say("Hello."))) as url:
        version = httpx.get(f"{url}/api/version").json()["version"]
    needed = {"copilot": (0, 6, 4), "codex --oss": (0, 13, 4), "agents by Messages": (0, 14, 2)}
    assert tuple(map(int, version.split("."))) >= max(needed.values())
