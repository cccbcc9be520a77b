"""HTTP requests and responses as values that pass between processes. Imports no Ray.

ingress                              replica
Ingress   ── ForwardedRequest ──▶    RayReplica.respond
          ◀── ASGI messages ───
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pippin.api.app import Application
from pippin.api.http.access_control import Keys, key_in, network_of
from pippin.api.http.answers import ErrorResponse, RequestLog
from pippin.api.http.read_body import BodyBudget, Workers, decode_body, read_bytes
from pippin.config import Config, LimitsConfig, ServerConfig
from pippin.errors import EngineDead, PippinError, RequestError
from pippin.startup.engines import SupervisedEngine
from pippin.startup.launch import Engines, load_app
from pippin.startup.resolve import resolve

log = logging.getLogger(__name__)

KEPT = ("http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")
KEPT_LISTS = ("headers", "client", "server")
DISCONNECT_SECONDS = 5.0
BEFORE = ("tools", "system", "instructions")
PROMPTS = ("messages", "input", "prompt")
MAX_CHARS = 262_144  # of a prompt, for the router; what follows decides little
MAX_UNREAD = 32  # messages: then a reply waits for its client


@dataclass(frozen=True)
class ForwardedRequest:
    scope: dict[str, Any]
    body: bytes
    prompt: str  # Ray's router reads an attribute of this name

    @classmethod
    def of(cls, scope: Scope, body: bytes, prompt: str) -> ForwardedRequest:
        plain: dict[str, Any] = {name: scope[name] for name in KEPT if name in scope}
        plain |= {name: scope[name] and list(scope[name]) for name in KEPT_LISTS if name in scope}
        return cls(plain, body, prompt)

    def new_scope(self) -> Scope:
        headers = [(bytes(name), bytes(value)) for name, value in self.scope["headers"]]
        return {"type": "http", "asgi": {"version": "3.0"}, **self.scope, "headers": headers}


Forward = Callable[[ForwardedRequest], AsyncIterator[Message]]


class Ingress:
    """An ASGI app: reads a request within its limits and sends it to the replica of its prefix."""

    def __init__(self, server: ServerConfig, limits: LimitsConfig, forward: Forward) -> None:
        self._keys = Keys(server)
        self._limits = limits
        self._forward = forward
        self._workers = Workers()
        self._bodies = BodyBudget(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _answer_lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1000})
            return
        request = Request(scope, receive)
        try:
            body, prompt = await self._read(request)
        except PippinError as error:
            await RequestLog(ErrorResponse(error))(scope, receive, send)
            return
        except ClientDisconnect:
            return
        async for message in self._forward(ForwardedRequest.of(scope, body, prompt)):
            await send(message)

    async def _read(self, request: Request) -> tuple[bytes, str]:
        """Nothing of a request without a key: the replica refuses it by its headers."""
        owner = b""
        client: bytes | str = network_of(request.client.host) if request.client else ""
        if self._keys.are_needed:
            found = self._keys.owner(key_in(request.headers))
            if found is None:
                return b"", ""
            client = found
            owner = found if self._keys.separates else b""
        with self._bodies.claim(client) as claim:
            body = await read_bytes(request, self._limits, claim)
            prompt = await self._workers.run(prompt_text, body) if body else ""
        return bytes(body), owner.hex() + prompt if prompt else ""


async def respond(app: ASGIApp, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
    """What an app sends. Closing the generator is a disconnect of the client."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue(MAX_UNREAD)
    disconnected = asyncio.Event()
    requests = [request.body]

    async def receive() -> Message:
        if requests:
            return {"type": "http.request", "body": requests.pop(), "more_body": False}
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [tuple(pair) for pair in message["headers"]]}
        if not disconnected.is_set():
            await sent.put(message)

    async def run() -> None:
        try:
            await app(request.new_scope(), receive, send)
        finally:
            await sent.put(None)

    running = asyncio.ensure_future(run())
    try:
        while (message := await sent.get()) is not None:
            yield message
        running.result()
    finally:
        disconnected.set()
        while not sent.empty():  # there is room for what waits, and for the end
            sent.get_nowait()
        await asyncio.wait((running,), timeout=DISCONNECT_SECONDS)
        running.cancel()  # unless it is done


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    while True:
        event = await receive()
        await send({"type": f"{event['type']}.complete"})
        if event["type"] == "lifespan.shutdown":
            return


def prompt_text(body: bytes | bytearray) -> str:
    """The text by which a router compares prefixes: the next turn of a conversation begins with
    that of the turn before, since messages are taken one by one, in the order of chat templates.

    Empty: the request has none, or cannot be read, which a replica will report.
    """
    try:
        fields = decode_body(body)
    except RequestError:
        return ""
    if not isinstance(fields, dict):
        return ""
    prompt = next((fields[name] for name in PROMPTS if fields.get(name)), None)
    if prompt is None:
        return ""
    parts = [_text(fields[name]) for name in BEFORE if fields.get(name)]
    parts += map(_text, prompt) if isinstance(prompt, list) else [_text(prompt)]
    return "\n".join(parts)[:MAX_CHARS]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


class RayReplica:
    """A server without a socket, for one actor of Ray."""

    def __init__(self, app: Application, engine: Engines, supervising: asyncio.Task[None]) -> None:
        self._app = app
        self._engine = engine
        self._supervising = supervising

    @classmethod
    async def start(cls, config: Config) -> RayReplica:
        """When the model is loaded. Raises LoadError if it cannot be."""
        config = await asyncio.to_thread(resolve, config)
        supervised = SupervisedEngine(config, on_loading=log.info)
        supervising = asyncio.create_task(supervised.run())
        loading = asyncio.create_task(load_app(config, supervised))
        await asyncio.wait((supervising, loading), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            supervising.result()
        app = await loading
        app.resume_batches()
        return cls(app, supervised.engine, supervising)

    def respond(self, request: ForwardedRequest) -> AsyncGenerator[Message, None]:
        return respond(self._app, request)

    def check(self) -> None:
        """Raises if no engine will be started any more. One that is being replaced is no failure:
        loading a model again may take minutes, and requests wait or get a 503."""
        if self._supervising.done():
            reason = None if self._supervising.cancelled() else self._supervising.exception()
            raise EngineDead(str(reason or "the engine was stopped"))

    async def close(self) -> None:
        """Requests that still run end with an error."""
        await self._app.close()
        self._engine.close()
        self._supervising.cancel()
        await asyncio.wait((self._supervising,))
