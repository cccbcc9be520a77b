"""The HTTP server's routes. Knows requests and replies; knows no scheduler and no arrays."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pippin.api.engine_client import Engine
from pippin.api.http_errors import (
    JSONResponse,
    ModelNotFound,
    Unauthorized,
    error_response,
    on_http_exception,
    on_pippin_error,
    on_unexpected,
)
from pippin.api.openai import ModelInfo, parse_chat, parse_completion
from pippin.api.prepare import prepare_chat, prepare_completion
from pippin.api.shapes import ChatShape, CompletionShape
from pippin.api.stream import JobResponse
from pippin.config import ServerConfig
from pippin.errors import NotReady, PippinError, RequestError
from pippin.text.bundle import TextBundle


def create_app(
    engine: Engine, text: TextBundle, config: ServerConfig, model: ModelInfo
) -> Starlette:
    api = _Api(engine, text, model)
    guard = [Middleware(_ApiKeyGuard, api_key=config.api_key)] if config.api_key else []
    return Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/v1/models/{id:path}", api.model),
            Route("/health", api.health),
            Route("/ready", api.ready),
            Route("/status", api.status),
            Route("/flush_cache", api.flush_cache, methods=["POST"]),
        ],
        middleware=guard,
        exception_handlers={
            PippinError: on_pippin_error,
            HTTPException: on_http_exception,
            Exception: on_unexpected,
        },
    )


class _Api:
    """The endpoints, bound to one engine and one model."""

    def __init__(self, engine: Engine, text: TextBundle, model: ModelInfo) -> None:
        self._engine = engine
        self._text = text
        self._model = model

    async def chat_completions(self, request: Request) -> Response:
        self._engine.check_ready()
        chat = parse_chat(await _read_json(request), self._model, self._text.defaults)
        # Long prompts take a while to tokenize; other clients' streams must not wait for it.
        job = await asyncio.to_thread(prepare_chat, chat, self._text, self._model)
        with_logprobs = chat.options.params.logprobs is not None
        shape = ChatShape(self._text.tokenizer, with_logprobs=with_logprobs)
        return JobResponse(job, shape, self._engine)

    async def completions(self, request: Request) -> Response:
        self._engine.check_ready()
        completion = parse_completion(await _read_json(request), self._model, self._text.defaults)
        job = await asyncio.to_thread(prepare_completion, completion, self._text, self._model)
        with_logprobs = completion.options.params.logprobs is not None
        shape = CompletionShape(self._text.tokenizer, with_logprobs=with_logprobs)
        return JobResponse(job, shape, self._engine)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._describe_model()]})

    async def model(self, request: Request) -> Response:
        id = request.path_params["id"]
        if id != self._model.name:
            raise ModelNotFound(f"the model {id!r} does not exist", param="model")
        return JSONResponse(self._describe_model())

    async def health(self, request: Request) -> Response:
        if not self._engine.healthy:
            raise NotReady(self._engine.reason or "the engine is not running")
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        self._engine.check_ready()
        return JSONResponse({"status": "ready"})

    async def status(self, request: Request) -> Response:
        return JSONResponse(await self._engine.status())

    async def flush_cache(self, request: Request) -> Response:
        return JSONResponse(await self._engine.flush_cache())

    def _describe_model(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created_s,
            "owned_by": "pippin",
            "max_model_len": self._model.max_len,
        }


async def _read_json(request: Request) -> Any:
    try:
        return msgspec.json.decode(await request.body())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from error


class _ApiKeyGuard:
    """Lets nobody past without the key, except to ask whether the server is alive."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in ("/health", "/ready"):
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
            return
        error = Unauthorized("the API key is missing or wrong: send it as a bearer token")
        await error_response(error)(scope, receive, send)
