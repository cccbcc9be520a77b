"""Requests that reach the API as values: the same replies, limits and disconnects as over HTTP."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from api.scripted_engine import BUNDLED, ScriptedEngine, build_app, hang, say
from cases import cases
from pippin.config import Config, EngineConfig, LimitsConfig, ModelConfig, ServerConfig
from pippin.errors import EngineDead, LoadError
from pippin_ray.forwarding import (
    MAX_CHARS,
    MAX_UNREAD,
    ForwardedRequest,
    Ingress,
    RayReplica,
    prompt_text,
    respond,
)

CHAT = "/v1/chat/completions"
ASK = {"model": "stories", "messages": [{"role": "user", "content": "A fox?"}]}
KEY = {"Authorization": "Bearer k"}


class Deployment:
    """An ingress and one replica; what passes between them is pickled, as Ray does."""

    def __init__(
        self, engine: ScriptedEngine, server: ServerConfig | None = None, **limits: Any
    ) -> None:
        server = server or ServerConfig()
        self.app = build_app(engine, server)
        self.ingress = Ingress(server, LimitsConfig(**limits), self._forward)
        self.forwarded: list[ForwardedRequest] = []

    async def _forward(self, request: ForwardedRequest) -> AsyncIterator[Message]:
        self.forwarded.append(request)
        async for message in respond(self.app, pickle.loads(pickle.dumps(request))):
            yield pickle.loads(pickle.dumps(message))

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.ingress)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as one:
                return await one.request(method, path, **options)

        return asyncio.run(send())


def test_replies_pass_whole_and_streamed_in_every_dialect() -> None:
    deployment = Deployment(ScriptedEngine(say("Once upon a time.")))
    whole = deployment.ask("POST", CHAT, json=ASK)
    assert whole.json()["choices"][0]["message"]["content"] == "Once upon a time."
    streamed = deployment.ask("POST", CHAT, json={**ASK, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    texts = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(texts) == "Once upon a time."
    assert len([text for text in texts if text]) > 1
    message = deployment.ask("POST", "/v1/messages", json={**ASK, "max_tokens": 9})
    assert message.json()["content"][0]["text"] == "Once upon a time."
    assert deployment.ask("GET", "/v1/models").json()["data"][0]["id"] == "stories"
    assert deployment.ask("GET", "/").headers["content-type"].startswith("text/html")


def test_a_client_that_disconnects_aborts_its_request() -> None:
    engine = ScriptedEngine(hang(after="Once upon"))
    app = build_app(engine)
    request = ForwardedRequest.of(scope(CHAT), json.dumps({**ASK, "stream": True}).encode(), "")

    async def read_one_token() -> None:
        messages = respond(app, request)
        async for message in messages:
            if b"Once" in message.get("body", b""):
                break
        await messages.aclose()

    asyncio.run(read_one_token())
    assert engine.aborted == [engine.submits[0].id]


def test_a_reply_waits_for_a_client_that_does_not_read() -> None:
    written: list[int] = []

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(1_000):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            written.append(number)

    async def run() -> None:
        messages = respond(app, ForwardedRequest.of(scope("/"), b"", ""))
        await anext(messages)
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(written) <= MAX_UNREAD
        await messages.aclose()
        assert len(written) == 1_000  # it ended by itself: nothing waits for ever

    asyncio.run(run())


def test_an_app_that_fails_before_it_responds_fails_the_call() -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("broken")

    async def read() -> None:
        async for _ in respond(broken, ForwardedRequest.of(scope("/"), b"", "")):
            pass

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(read())


def test_the_body_of_a_request_without_a_key_is_neither_read_nor_forwarded() -> None:
    deployment = Deployment(ScriptedEngine(say("Yes.")), ServerConfig(api_key=("k",)))
    assert deployment.ask("POST", CHAT, json=ASK).status_code == 401
    assert (deployment.forwarded[-1].body, deployment.forwarded[-1].prompt) == (b"", "")
    assert deployment.ask("POST", CHAT, json=ASK, headers=KEY).status_code == 200
    assert "fox" in deployment.forwarded[-1].prompt
    assert deployment.ask("GET", "/health").status_code == 200  # probes need no key


def test_a_body_above_the_limit_is_refused_before_it_is_forwarded() -> None:
    deployment = Deployment(ScriptedEngine(say("Yes.")), max_body_bytes=64)
    refused = deployment.ask("POST", CHAT, json=ASK)
    assert refused.status_code == 413
    assert "at most 64 bytes" in refused.json()["error"]["message"]
    assert deployment.forwarded == []


def test_prompts_of_keys_that_share_no_prefixes_differ_from_their_first_character() -> None:
    server = ServerConfig(api_key=("one", "two"))
    deployment = Deployment(ScriptedEngine(say("Yes.")), server)
    for key in ("one", "two"):
        deployment.ask("POST", CHAT, json=ASK, headers={"Authorization": f"Bearer {key}"})
    first, second = (request.prompt for request in deployment.forwarded)
    assert first != second
    assert first[-6:] == second[-6:]
    shared = Deployment(ScriptedEngine(say("Yes.")), ServerConfig(api_key=("k",)))
    shared.ask("POST", CHAT, json=ASK, headers=KEY)
    assert first.endswith(shared.forwarded[0].prompt)


def scope(path: str) -> Scope:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    method = {"method": "POST", "path": path, "query_string": b"", "http_version": "1.1"}
    return {"type": "http", **method, "headers": headers, "client": ("127.0.0.1", 5), "state": {}}


USER = {"role": "user", "content": "Who are you?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function"}]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "4"}]}
BLOCKS = {"role": "assistant", "content": [{"type": "text", "text": "A fox."}]}


def text_of(**fields: Any) -> str:
    return prompt_text(json.dumps(fields).encode())


@pytest.mark.parametrize("field", ["messages", "input"])
def test_each_turn_begins_with_the_text_of_the_turn_before(field: str) -> None:
    turns: list[dict[str, Any]] = [USER, CALL, RESULT, BLOCKS, USER]
    before = {"tools": [{"name": "add"}], "system": "Be brief.", "instructions": "Be kind."}
    texts = [text_of(**before, **{field: turns[:end]}) for end in range(1, len(turns) + 1)]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)
        assert len(longer) > len(shorter)


def test_what_templates_put_before_the_messages_is_before_them() -> None:
    text = text_of(messages=[USER], system="Be brief.", tools=[{"name": "add"}])
    assert text.index("add") < text.index("Be brief.") < text.index("Who")
    assert text_of(messages=[USER], system="Be rude.") not in text


def test_branches_of_one_prompt_share_all_characters_before_they_differ() -> None:
    first, second = (text_of(prompt=f"One story. {end}") for end in ("A fox", "A cat"))
    assert first[:13] == second[:13] == "One story. A "


@cases(
    "body",
    [b"", b"{", b"[]", b'"text"', b"{}", b'{"messages": []}', b'{"messages": null}', b"[" * 10**6],
)
def test_what_has_no_prompt_or_is_not_valid_has_no_text(body: bytes) -> None:
    assert prompt_text(body) == ""


def test_a_text_is_bounded() -> None:
    assert len(text_of(prompt="fox " * MAX_CHARS)) == MAX_CHARS


@pytest.mark.slow
def test_a_replica_responds_until_it_is_closed_and_then_fails_its_check() -> None:
    async def run() -> bytes:
        model = ModelConfig(model=str(BUNDLED), backend="fake")
        server = ServerConfig(served_name="stories", batch_bytes=0)
        replica = await RayReplica.start(Config(model, server=server))
        replica.check()
        body = json.dumps({**ASK, "max_tokens": 3, "ignore_eos": True}).encode()
        request = ForwardedRequest.of(scope(CHAT), body, "")
        messages = [message async for message in replica.respond(request)]
        assert messages[0]["status"] == 200
        await replica.close()
        with pytest.raises(EngineDead, match="stopped"):
            replica.check()
        return b"".join(message.get("body", b"") for message in messages)

    assert json.loads(asyncio.run(run()))["usage"]["completion_tokens"] == 3


@pytest.mark.slow
def test_an_engine_that_cannot_start_is_an_error_of_the_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    model = ModelConfig(model=str(BUNDLED), backend="fake")
    engine = EngineConfig(cache_dir=str(file), disk="1GB")
    with pytest.raises(LoadError, match="file"):
        asyncio.run(RayReplica.start(Config(model, engine)))
