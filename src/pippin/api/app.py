"""The HTTP server's routes. Knows requests and replies; knows no scheduler and no arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route, Router
from starlette.types import ASGIApp

from pippin.api.dialects.chat_completions import ChatDialect, parse_chat
from pippin.api.dialects.completions import CompletionsDialect, parse_completion
from pippin.api.dialects.dialect import Dialect
from pippin.api.dialects.messages.message_reply import MessagesDialect, messages_error
from pippin.api.dialects.messages.message_request import parse_message_request
from pippin.api.dialects.responses.response_reply import ResponsesDialect
from pippin.api.dialects.responses.response_request import ResponsesRequest, parse_responses_request
from pippin.api.dialects.responses.response_store import ResponseStores, StoredTurn
from pippin.api.endpoints.routes import Endpoints
from pippin.api.endpoints.stored_responses import stored_routes
from pippin.api.http.access_control import access_checks, owner_of, owner_salt_of, shows_prompts
from pippin.api.http.admins import Admins
from pippin.api.http.http_errors import (
    ErrorShapes,
    JSONResponse,
    error_response,
    on_client_disconnect,
    on_http_exception,
    on_pippin_error,
    on_unexpected,
)
from pippin.api.http.keys import known_keys
from pippin.api.http.read_body import decode_body, read_body
from pippin.api.http.request_log import RequestLog, record_of
from pippin.api.http.sending import StreamResponse, WholeResponse
from pippin.api.http.workers import Workers
from pippin.api.jobs.facts import facts_of
from pippin.api.jobs.prepare import Job, prepare_chat, prepare_completion, render_prompt
from pippin.api.jobs.reply import reply_events, whole_reply
from pippin.api.metered_engine import MeteredEngine, ReplyTimes
from pippin.api.model_info import ModelInfo
from pippin.api.page.routes import page_paths, page_routes
from pippin.config import LimitsConfig, ServerConfig
from pippin.engine.engine_client import Engine
from pippin.errors import NotReady, PippinError
from pippin.text.bundle import SamplingDefaults, TextBundle


def create_app(
    engine: Engine,
    text: TextBundle,
    config: ServerConfig,
    model: ModelInfo,
    limits: LimitsConfig,
) -> ASGIApp:
    registry = CollectorRegistry()
    engine = MeteredEngine(engine, ReplyTimes(registry))
    num_owners = max(1, len(known_keys(config)))
    stored = ResponseStores(config.stored_responses, config.stored_bytes, num_owners)
    endpoints = Endpoints(engine, text, config, model, limits, registry)
    api = _Api(engine, text, config, model, limits, stored)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/responses", api.responses, methods=["POST"]),
            *stored_routes(stored),
            Route("/v1/messages", api.messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", api.count_tokens, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/v1/models/{id:path}", api.model),
            Route("/health", api.health),
            Route("/ready", api.ready),
            Route("/status", api.status),
            Route("/flush_cache", api.flush_cache, methods=["POST"]),
            *endpoints.routes(),
            *(page_routes() if config.page else ()),
        ],
        middleware=access_checks(config, page_paths() if config.page else frozenset()),
        exception_handlers={
            PippinError: on_pippin_error,
            HTTPException: on_http_exception,
            ClientDisconnect: on_client_disconnect,
            Exception: on_unexpected,
        },
    )
    return RequestLog(ErrorShapes(app, {"/v1/messages": messages_error}))


def create_waiting_app(config: ServerConfig, reason: str) -> ASGIApp:
    """Before there is a model: the page, which says so, and a 503 to all else."""
    refusal = Mount("", app=error_response(NotReady(reason)))
    return RequestLog(Router([*(page_routes() if config.page else ()), refusal]))


class _Api:
    """The endpoints, bound to one engine and one model."""

    def __init__(
        self,
        engine: Engine,
        text: TextBundle,
        config: ServerConfig,
        model: ModelInfo,
        limits: LimitsConfig,
        stored: ResponseStores,
    ) -> None:
        self._engine = engine
        self._text = text
        self._model = model
        self._limits = limits
        self._stored = stored
        self._log_prompts = config.log_prompts
        self._shows_prompts = shows_prompts(config)
        self._admins = Admins(config)
        self._workers = Workers()

    async def chat_completions(self, request: Request) -> Response:
        job = await self._prepare(request, self._chat_job)
        return self._answer(job, ChatDialect(job, self._text.tokenizer))

    async def completions(self, request: Request) -> Response:
        job = await self._prepare(request, self._completion_job)
        return self._answer(job, CompletionsDialect(job, self._text.tokenizer))

    async def responses(self, request: Request) -> Response:
        stored = self._stored.of(owner_of(request.scope))
        read: list[ResponsesRequest] = []

        def prepare(body: bytes) -> Job:
            fields = decode_body(body)
            asked = parse_responses_request(fields, *self._rules, stored=stored)
            read.append(asked)
            return prepare_chat(asked.chat, self._text, self._model, prefix="resp_")

        def keep(response: dict[str, Any]) -> bool:
            if not asked.store:
                return False
            turn = StoredTurn.of(asked.items, response["output"], asked.previous)
            return stored.put(response, turn)

        job = await self._prepare(request, prepare)
        (asked,) = read
        return self._answer(job, ResponsesDialect(job, asked.echo, keep))

    async def messages(self, request: Request) -> Response:
        job = await self._prepare(request, self._message_job)
        return self._answer(job, MessagesDialect(job))

    async def count_tokens(self, request: Request) -> Response:
        """How long a prompt would be; nothing is computed."""
        body = await read_body(request, self._limits)
        return JSONResponse({"input_tokens": await self._workers.run(self._prompt_len, body)})

    async def models(self, request: Request) -> Response:
        return JSONResponse(
            {"object": "list", "data": [self._describe_model(name) for name in self._model.names]}
        )

    async def model(self, request: Request) -> Response:
        id = request.path_params["id"]
        self._model.check_name(id)
        return JSONResponse(self._describe_model(id))

    async def health(self, request: Request) -> Response:
        if not self._engine.healthy:
            raise NotReady(self._engine.reason or "the engine is not running")
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        self._engine.check_ready()
        return JSONResponse({"status": "ready"})

    async def status(self, request: Request) -> Response:
        status = await self._engine.status()
        if (cache := status.get("cache")) is None:
            return JSONResponse(status)
        if not self._admins.admit(request.scope):
            del cache["recent_paths"]
        elif not self._shows_prompts:
            for path in cache["recent_paths"]:
                del path["first_tokens"], path["last_tokens"]
        return JSONResponse(status)

    async def flush_cache(self, request: Request) -> Response:
        self._admins.check(request.scope)
        return JSONResponse(await self._engine.flush_cache())

    async def _prepare(self, request: Request, prepare: Callable[[bytes], Job]) -> Job:
        self._engine.check_ready()
        body = await read_body(request, self._limits)
        job = await self._workers.run(prepare, body)
        job.keep_apart(owner_salt_of(request.scope))
        record_of(request.scope).facts = lambda: facts_of(
            job, self._text.tokenizer if self._log_prompts else None
        )
        return job

    @property
    def _rules(self) -> tuple[ModelInfo, SamplingDefaults, LimitsConfig]:
        """What every dialect reads a request by."""
        return self._model, self._text.defaults, self._limits

    def _message_job(self, body: bytes) -> Job:
        chat = parse_message_request(decode_body(body), *self._rules)
        return prepare_chat(chat, self._text, self._model, prefix="msg_")

    def _prompt_len(self, body: bytes) -> int:
        chat = parse_message_request(decode_body(body), *self._rules, counts_only=True)
        return len(render_prompt(chat, self._text, self._model.max_counted_bytes).tokens)

    def _chat_job(self, body: bytes) -> Job:
        chat = parse_chat(decode_body(body), *self._rules)
        return prepare_chat(chat, self._text, self._model)

    def _completion_job(self, body: bytes) -> Job:
        completion = parse_completion(decode_body(body), *self._rules)
        return prepare_completion(completion, self._text, self._model)

    def _answer(self, job: Job, dialect: Dialect) -> Response:
        if not job.stream:
            return WholeResponse(lambda: whole_reply(job, dialect, self._engine), job.timeout_s)
        events = reply_events(job, dialect, self._engine)
        return StreamResponse(events, tell=dialect.error, timeout_s=job.timeout_s)

    def _describe_model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._model.created_s,
            "owned_by": "pippin",
            "max_model_len": self._model.max_len,
        }
