"""Requests that reach the API as values: the same replies, limits and disconnects as over HTTP."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from api.scripted_engine import ScriptedEngine, build_app, hang, say
from pippin.config import LimitsConfig, ServerConfig
from pippin.deploy.forwarding import MAX_UNREAD, ForwardedRequest, Ingress, respond

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
