"""An engine that says what a test tells it to, and a real HTTP server in front of it."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from pippin.api.app import Application, create_waiting_app
from pippin.api.http.limited_connection import uvicorn_config
from pippin.api.model_info import ModelInfo
from pippin.api.served_models import FixedModel, ServedModels
from pippin.config import LimitsConfig, ServerConfig
from pippin.engine.engine_client import WatchEvent
from pippin.errors import NotReady
from pippin.messages import Submit, TokenDelta
from pippin.text.bundle import TextBundle
from pippin.types import TokenLogprobs
from processes import wait_until

BUNDLED = Path(__file__).parents[2] / "src/pippin/models/stories-hybrid-20m"
TEXT = TextBundle.load(BUNDLED)
TOKENIZER = TEXT.tokenizer
EOS = TOKENIZER.eos_ids[0]
MODEL = ModelInfo("stories", max_len=8192, vocab_size=8192, created_s=1, aliases=("gpt-4o",))

Script = Callable[[Submit], list[TokenDelta]]


def say(text: str) -> Script:
    """A script that generates `text` one token at a time and ends the reply."""
    return say_tokens([*TOKENIZER.encode(text), EOS])


def say_tokens(tokens: list[int]) -> Script:
    def script(submit: Submit) -> list[TokenDelta]:
        given = tokens[: submit.params.max_tokens]
        return [
            TokenDelta(
                submit.id,
                tokens=[token],
                logprobs=_logprobs([token], submit.params.logprobs),
                prompt_logprobs=(
                    _logprobs(submit.token_ids[1:], submit.params.prompt_logprobs)
                    if i == 0
                    else None
                ),
                cached_tokens=3 if i == 0 else None,
                queued_s=0.25 if i == 0 else None,
                finish=_finish(token, i, given, submit),
            )
            for i, token in enumerate(given)
        ]

    return script


def _finish(token: int, i: int, given: list[int], submit: Submit) -> Any:
    if i < len(given) - 1:
        return None
    return "stop" if token in submit.stop_ids else "length"


def _logprobs(tokens: list[int], num_top: int | None) -> list[TokenLogprobs] | None:
    """Token t has the log probability -t/1000, and the tokens after it are its alternatives."""
    if num_top is None:
        return None
    return [
        TokenLogprobs(
            -t / 1000,
            tuple(range(t, t + num_top)),
            tuple(-(t + k) / 1000 for k in range(num_top)),
        )
        for t in tokens
    ]


def fail(message: str, *, after: str = "", code: str = "overloaded", status: int = 503) -> Script:
    def script(submit: Submit) -> list[TokenDelta]:
        said = [TokenDelta(submit.id, tokens=[token]) for token in TOKENIZER.encode(after)]
        error = TokenDelta(
            submit.id, finish="error", error=message, error_code=code, error_status=status
        )
        return [*said, error]

    return script


def hang(*, after: str = "") -> Script:
    """Never finishes: for clients that do not wait."""
    tokens = TOKENIZER.encode(after) if after else []
    return lambda submit: [TokenDelta(submit.id, tokens=[token]) for token in tokens]


class ScriptedEngine:
    """Runs one script for every request, or one for each in turn."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = scripts
        self.submits: list[Submit] = []
        self.aborted: list[str] = []
        self.num_restarts = 0
        self.finished: list[str] = []
        self.reason: str | None = None
        self.state: dict[str, Any] = {"running": 0}  # what `status` tells
        self.numbers: dict[str, Any] = {}  # what `counters` tells
        self.events: list[WatchEvent] = []  # what watchers are told; then the stream ends
        self.nodes: dict[int, dict[str, Any]] = {}

    @property
    def healthy(self) -> bool:
        return self.reason is None

    def check_ready(self) -> None:
        if self.reason is not None:
            raise NotReady(self.reason)

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        script = self._scripts[len(self.submits) % len(self._scripts)]
        self.submits.append(submit)
        over = False
        try:
            for delta in script(submit):
                await asyncio.sleep(0)
                over = delta.finish is not None
                yield delta
            if not over:
                await asyncio.Event().wait()
        finally:
            if not over and submit.id not in self.finished:
                self.abort(submit.id)

    def abort(self, id: str) -> None:
        self.aborted.append(id)

    def finish(self, id: str) -> None:
        self.finished.append(id)

    async def status(self) -> dict[str, Any]:
        return self.state

    async def counters(self) -> dict[str, Any]:
        if self.reason is not None:
            raise NotReady(self.reason)
        return self.numbers

    async def flush_cache(self) -> dict[str, Any]:
        return {"freed_bytes": 0}

    async def watch(self, replica: int = 0) -> AsyncGenerator[WatchEvent, None]:
        for event in self.events:
            yield event

    async def node(self, node: int, replica: int = 0) -> dict[str, Any]:
        return self.nodes.get(node, {}) if replica == 0 else {}

    def restart(self) -> None:
        self.num_restarts += 1


class _Switchboard:
    """One real server for most tests (starting one takes longer than a test), one app at a time."""

    def __init__(self, limits: LimitsConfig | None = None) -> None:
        self.app: Application | ASGIApp | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        config = uvicorn_config(
            self._serve, limits or LimitsConfig(), port=0, interface="asgi3", lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started)

    @property
    def address(self) -> tuple[str, int]:
        return self._server.servers[0].sockets[0].getsockname()[:2]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.address[1]}"

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.app is not None, "a request outside of `serving`"
        self._loop = asyncio.get_running_loop()
        await self.app(scope, receive, send)

    def close_app(self) -> None:
        """As a server that stops does: batches are not run any more."""
        app, self.app = self.app, None
        if isinstance(app, Application) and self._loop is not None:
            asyncio.run_coroutine_threadsafe(app.close(), self._loop).result()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@functools.cache
def _switchboard() -> _Switchboard:
    board = _Switchboard()
    atexit.register(board.stop)
    return board


def build_app(
    engine: ScriptedEngine,
    config: ServerConfig | None = None,
    limits: LimitsConfig | None = None,
    *,
    text: TextBundle = TEXT,
    model: ModelInfo = MODEL,
) -> Application:
    """An app of one model."""
    config, limits = config or ServerConfig(), limits or LimitsConfig()
    models = ServedModels([FixedModel(engine, text, model, config, limits)])
    return Application(models, config, limits)


@contextmanager
def serving(
    engine: ScriptedEngine,
    config: ServerConfig | None = None,
    limits: LimitsConfig | None = None,
    *,
    text: TextBundle = TEXT,
    model: ModelInfo = MODEL,
) -> Iterator[str]:
    """The app on a free port of this machine; yields its URL."""
    board = _switchboard()
    board.app = build_app(engine, config, limits, text=text, model=model)
    try:
        yield board.url
    finally:
        board.close_app()


@contextmanager
def serving_each(**engines: ScriptedEngine) -> Iterator[str]:
    """An app of several models, which are all loaded."""
    config, limits, board = ServerConfig(), LimitsConfig(), _switchboard()
    models = []
    for name, engine in engines.items():
        others = tuple(other for other in engines if other != name)
        info = replace(MODEL, name=name, aliases=(f"{name}-alias",), other_names=others)
        models.append(FixedModel(engine, TEXT, info, config, limits))
    board.app = Application(ServedModels(models), config, limits)
    try:
        yield board.url
    finally:
        board.close_app()


@contextmanager
def waiting(reason: str) -> Iterator[str]:
    """The same server while there is no model yet; `serving` inside of it is when there is."""
    board = _switchboard()
    board.app = create_waiting_app(ServerConfig(), reason)
    try:
        yield board.url
    finally:
        board.app = None


@contextmanager
def serving_alone(
    engine: ScriptedEngine, limits: LimitsConfig, config: ServerConfig | None = None
) -> Iterator[tuple[str, int]]:
    """A server of its own, whose connections keep to `limits` too; yields its address."""
    board = _Switchboard(limits)
    board.app = build_app(engine, config, limits)
    try:
        yield board.address
    finally:
        board.stop()


@contextmanager
def asking(url: str, body: dict[str, Any]) -> Iterator[None]:
    """A client that has sent its request and reads nothing; it hangs up in the end."""
    host, _, path = url.removeprefix("http://").partition("/")
    name, _, port = host.partition(":")
    content = json.dumps(body).encode()
    head = f"POST /{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((name, int(port))) as client:
        client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield


def answer_anything(submit: Submit) -> list[TokenDelta]:
    """A token, or the vector of an embedding."""
    if submit.embeds:
        return [TokenDelta(submit.id, embedding=b"\0\0\x80?" * 4, finish="stop")]
    return say_tokens([5])(submit)
