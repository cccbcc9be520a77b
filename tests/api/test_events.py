"""`GET /events` sends what the engine wrote, and shows no text to whom it does not belong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from scripted_engine import TEXT, ScriptedEngine, serving

from cases import cases
from pippin.api.http.access_control import shows_prompts
from pippin.config import ServerConfig
from pippin.engine.engine_client import WatchEvent

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
