"""The HTTP server: all routes in one table, and what is made of it: access, OpenAPI, the app."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.convertors import Convertor, IntegerConvertor
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route, Router, compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from pippin.api.batches import routes as batches
from pippin.api.batches.store import ENDPOINTS as LINE_ENDPOINTS
from pippin.api.dialects import infill, messages, ollama, responses
from pippin.api.dialects.chat_completions import (
    CHAT,
    COMPLETION,
    ChatDialect,
    CompletionsDialect,
    parse_chat,
    parse_completion,
)
from pippin.api.endpoints import embeddings, generation
from pippin.api.endpoints import ollama as ollamas
from pippin.api.endpoints import server_info as server
from pippin.api.endpoints.app_state import AppState, Handler
from pippin.api.endpoints.generation import answered_whole, counts, generates, read_by
from pippin.api.endpoints.metrics_endpoint import MeteredEngine, ServerMetrics
from pippin.api.endpoints.server_info import ANTHROPIC_HEADER
from pippin.api.http.access_control import AccessControl, Keys
from pippin.api.http.answers import (
    ERROR_HANDLERS,
    ErrorResponse,
    ErrorShape,
    JSONResponse,
    RequestLog,
    record_of,
)
from pippin.api.http.sending import EVENTS, JSON_LINES
from pippin.api.model_info import RequestRules
from pippin.api.page import page_paths, page_routes
from pippin.api.requests.fields import FieldTable
from pippin.api.response_store import ResponseStores
from pippin.api.served_models import ServedModels
from pippin.config import LimitsConfig, ServerConfig
from pippin.errors import NotReady, PippinError

OpenApi = dict[str, Any]


@dataclass(frozen=True)
class Endpoint:
    method: str
    path: str
    handler: Handler
    body: FieldTable | None = None  # of JSON
    form: FieldTable | None = None  # beside a file
    query: FieldTable | None = None  # the handler finds it in `request.state.query`
    is_local: bool = False  # pages from this machine may use it
    is_admin: bool = False  # with keys, an admin's is needed
    is_probe: bool = False  # by machines, every few seconds: in the log only if it fails
    is_open: bool = False  # without a key
    streams: bool = False  # always; others do where their body has such a field


def _local(method: str, paths: str, handler: Handler, body: FieldTable | None) -> list[Endpoint]:
    """Of one or more paths."""
    return [Endpoint(method, path, handler, body, is_local=True) for path in paths.split()]


async def _openapi(state: AppState, request: Request) -> Response:
    return JSONResponse(openapi_document(state.rules, needs_key=bool(state.config.api_key)))


_rerank = answered_whole(embeddings.parse_rerank, embeddings.whole_rerank)
_score = answered_whole(embeddings.parse_score, embeddings.whole_score)
_embed = answered_whole(embeddings.parse_embeddings, embeddings.whole_embeddings)
_chats = generates(parse_chat, ChatDialect)
_completions = generates(parse_completion, CompletionsDialect)
_responses = generates(responses.parse_responses_request, responses.ResponsesDialect)
_input_tokens = counts(
    partial(responses.parse_responses_request, table=responses.INPUT_TOKENS),
    object="response.input_tokens",
)
_count_tokens = counts(partial(messages.parse_message_request, table=messages.COUNT_TOKENS))
_messages = generates(messages.parse_message_request, messages.MessagesDialect)
_ollama_chat = ollamas.replies(
    ollama.parse_ollama_chat,
    ollama.OllamaChat,
    {"message": {"role": "assistant", "content": ""}},
)
_ollama_generate = ollamas.replies(ollama.parse_generate, ollama.OllamaGenerate, {"response": ""})

ENDPOINTS = (
    *_local("POST", "/v1/chat/completions", _chats, CHAT),
    *_local("POST", "/v1/completions", _completions, COMPLETION),
    *_local("POST", "/infill", generates(infill.parse_infill, infill.InfillDialect), infill.INFILL),
    *_local("POST", "/v1/responses", _responses, responses.RESPONSES),
    *_local("POST", "/v1/responses/input_tokens", _input_tokens, responses.INPUT_TOKENS),
    *_local("POST", "/v1/messages", _messages, messages.MESSAGES),
    *_local("POST", "/v1/messages/count_tokens", _count_tokens, messages.COUNT_TOKENS),
    *_local("POST", "/v1/embeddings", _embed, embeddings.EMBEDDINGS),
    # Jina's, Cohere's, vLLM's
    *_local("POST", "/v1/rerank /v2/rerank /rerank", _rerank, embeddings.RERANK),
    *_local("POST", "/v1/score /score", _score, embeddings.SCORE),
    *_local("POST", "/api/chat", _ollama_chat, ollama.CHAT),
    *_local("POST", "/api/generate", _ollama_generate, ollama.GENERATE),
    *_local("POST", "/api/embed", ollamas.embed, ollama.EMBED),
    *_local("POST", "/api/embeddings", ollamas.embeddings, ollama.EMBEDDINGS),
    *_local("POST", "/api/show", read_by(ollamas.show), ollama.SHOW),
    *_local("POST", "/tokenize", read_by(generation.tokenize), generation.TOKENIZE),
    *_local("POST", "/detokenize", read_by(generation.detokenize), generation.DETOKENIZE),
    *_local("GET", "/api/tags", ollamas.tags, None),
    *_local("GET", "/api/ps", ollamas.ps, None),
    *_local("GET", "/api/version", ollamas.version, None),
    *_local("GET", "/v1/models", server.list_models, None),
    *_local("GET", "/v1/models/{id:path}", server.show_model, None),
    Endpoint("GET", "/health", server.health, is_local=True, is_probe=True, is_open=True),
    Endpoint("GET", "/ready", server.ready, is_local=True, is_probe=True, is_open=True),
    Endpoint("POST", "/api/pull", ollamas.pull, ollama.PULL),
    Endpoint("DELETE", "/api/delete", ollamas.delete),
    Endpoint(
        "GET", "/v1/responses/{id}", generation.show_response, query=responses.STORED_RESPONSE
    ),
    Endpoint("DELETE", "/v1/responses/{id}", generation.delete_response, query=FieldTable({})),
    Endpoint(
        "GET",
        "/v1/responses/{id}/input_items",
        generation.list_input_items,
        query=responses.STORED_ITEMS,
    ),
    Endpoint("POST", "/v1/files", batches.create_file, form=batches.UPLOAD),
    Endpoint("GET", "/v1/files", batches.list_files, query=batches.FILE_LIST),
    Endpoint("GET", "/v1/files/{id}", batches.show_file, query=FieldTable({})),
    Endpoint("DELETE", "/v1/files/{id}", batches.delete_file, query=FieldTable({})),
    Endpoint("GET", "/v1/files/{id}/content", batches.file_content, query=FieldTable({})),
    Endpoint("POST", "/v1/batches", batches.create_batch, batches.BATCH),
    Endpoint("GET", "/v1/batches", batches.list_batches, query=batches.BATCH_LIST),
    Endpoint("GET", "/v1/batches/{id}", batches.show_batch, query=FieldTable({})),
    Endpoint("POST", "/v1/batches/{id}/cancel", batches.cancel_batch, query=FieldTable({})),
    # SGLang's older and newer names
    Endpoint("GET", "/get_model_info", server.model_info),
    Endpoint("GET", "/model_info", server.model_info),
    Endpoint("GET", "/get_server_info", server.server_info),
    Endpoint("GET", "/server_info", server.server_info),
    Endpoint("GET", "/status", server.status),
    Endpoint("POST", "/flush_cache", server.flush_cache, is_admin=True),
    Endpoint("POST", "/restart_replicas", server.restart_replicas, is_admin=True),
    Endpoint("GET", "/metrics", lambda state, request: state.metrics.show(request), is_probe=True),
    Endpoint("GET", "/events", server.events, is_admin=True, streams=True),
    Endpoint("GET", "/events/node/{id:int}", server.node, is_admin=True),
    Endpoint("GET", "/openapi.json", _openapi),
)
# Clients that were given an address without /v1 send paths like /chat/completions.
VERSIONED = frozenset(each.path.split("/")[2] for each in ENDPOINTS if each.path.startswith("/v1/"))
OPEN_PATHS = frozenset(each.path for each in ENDPOINTS if each.is_open)
_LOCAL = [compile_path(each.path)[0] for each in ENDPOINTS if each.is_local and "{" in each.path]
_LOCAL_PATHS = frozenset(each.path for each in ENDPOINTS if each.is_local)


def is_local_path(path: str) -> bool:
    return path in _LOCAL_PATHS or any(pattern.match(path) for pattern in _LOCAL)


def starlette_routes(state: AppState, paths: Iterable[str] | None = None) -> list[Route]:
    return [
        Route(each.path, _endpoint(each, state), methods=[each.method])
        for each in ENDPOINTS
        if paths is None or each.path in paths
    ]


def _endpoint(row: Endpoint, state: AppState) -> Any:
    async def handle(request: Request) -> Response:
        record_of(request.scope).quiet = row.is_probe
        if row.is_admin:
            state.keys.check_admin(request.scope)
        if row.query is not None:
            request.state.query = generation.read_query(request, row.query, state.rules)
        return await row.handler(state, request)

    return handle


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_STRING = {"type": "string"}
ERROR_SCHEMAS = {
    "Error": _object(
        error=_object(
            message=_STRING,
            type={"enum": ["invalid_request_error", "server_error"]},
            param={"type": ["string", "null"]},
            code=_STRING,
        )
    ),
    "MessagesError": _object(type={"const": "error"}, error=_object(type=_STRING, message=_STRING)),
    "OllamaError": _object(error=_STRING),
}
# Errors of these paths and of all below them are not OpenAI's: the shape and its schema.
_SHAPES: dict[str, tuple[ErrorShape, str]] = {
    "/v1/messages": (messages.messages_error, "MessagesError"),
    "/api": (ollama.ollama_error, "OllamaError"),
}
# Those of these are Anthropic's for clients that send its header.
_SHARED = {"/v1/models": _SHAPES["/v1/messages"]}


def error_shape_of(path: str, *, is_anthropic: bool) -> tuple[ErrorShape | None, str]:
    for start, found in (_SHAPES | (_SHARED if is_anthropic else {})).items():
        if f"{path}/".startswith(f"{start}/"):
            return found
    return None, "Error"


def openapi_document(rules: RequestRules, *, needs_key: bool) -> OpenApi:
    paths: dict[str, Any] = {}
    for row in sorted(ENDPOINTS, key=lambda row: row.method):
        path = compile_path(row.path)[1]
        paths.setdefault(path, {})[row.method.lower()] = _operation(row, path, rules)
    document: OpenApi = {
        "openapi": "3.1.0",
        "info": {"title": "Pippin", "version": version("pippin")},
        "paths": paths,
        "components": {"schemas": dict(ERROR_SCHEMAS)},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(row: Endpoint, path: str, rules: RequestRules) -> dict[str, Any]:
    _, error = error_shape_of(path, is_anthropic=False)
    answers: dict[str, Any] = {"description": "the answer"}
    operation: dict[str, Any] = {
        "operationId": f"{row.method.lower()}{path.replace('/', '_')}",
        "responses": {"200": answers, "default": {"description": "an error"}},
    }
    schema = {"$ref": f"#/components/schemas/{error}"}
    operation["responses"]["default"]["content"] = {"application/json": {"schema": schema}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _path_schema(convertor)}
        for name, convertor in compile_path(row.path)[2].items()
    ]
    for name, kind in row.query.fields.items() if row.query is not None else ():
        parameters.append({"name": name, "in": "query", "schema": kind.schema(rules)})
    if parameters:
        operation["parameters"] = parameters
    if row.streams:
        answers["content"] = {EVENTS: {}}
    if row.form is not None:
        fields = {name: kind.schema(rules) for name, kind in row.form.fields.items()}
        form = _object(**fields, file={"type": "string", "format": "binary"})
        form |= {"required": [*row.form.required, "file"], "additionalProperties": False}
        operation["requestBody"] = _content("multipart/form-data", form)
    if row.body is not None:
        body = row.body.schema(rules)
        operation["requestBody"] = _content("application/json", body)
        answers["content"] = {"application/json": {}}
        if "stream" in body["properties"]:
            answers["content"][JSON_LINES if path.startswith("/api/") else EVENTS] = {}
    return operation


def _content(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {media_type: {"schema": schema}}}


def _path_schema(convertor: Convertor[Any]) -> dict[str, Any]:
    if isinstance(convertor, IntegerConvertor):
        return {"type": "integer", "minimum": 0}
    return {"type": "string"}


log = logging.getLogger(__name__)


class Application:
    """The app, and the batches that run beside its requests."""

    def __init__(self, models: ServedModels, config: ServerConfig, limits: LimitsConfig) -> None:
        metrics = ServerMetrics(models)
        num_owners = max(1, len(Keys(config).owners))
        state = AppState(
            models,
            config,
            limits,
            ResponseStores(config.stored_responses, config.stored_bytes, num_owners),
            use=lambda name, engine: MeteredEngine(engine, metrics.times(name)),
        )
        state.metrics = metrics
        state.batches = self._batches = batches.create_batches(
            state, lambda lines: starlette_routes(lines, LINE_ENDPOINTS)
        )
        app = Starlette(
            routes=[
                *starlette_routes(state),
                *(page_routes() if config.page else [Route("/", _greet)]),
            ],
            middleware=[
                Middleware(
                    AccessControl,
                    config=config,
                    public=OPEN_PATHS | (page_paths() if config.page else frozenset()),
                    is_local=is_local_path,
                )
            ],
            exception_handlers=ERROR_HANDLERS,
        )
        self._app = RequestLog(_with_shapes(app))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def resume_batches(self) -> None:
        """Those of an earlier server. If they cannot be read, requests are still answered."""
        try:
            self._batches.resume()
        except PippinError as error:
            log.warning("no batches are run: %s", error.message)

    async def close(self) -> None:
        await self._batches.close()


def _with_shapes(app: ASGIApp) -> ASGIApp:
    """An app that takes paths without /v1, and whose errors have the shape of their path, also
    those before a route is called."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if scope["path"].removeprefix("/").partition("/")[0] in VERSIONED:
                scope = {**scope, "path": f"/v1{scope['path']}"}
            is_anthropic = ANTHROPIC_HEADER in Headers(scope=scope)
            scope["state"]["error_shape"], _ = error_shape_of(
                scope["path"], is_anthropic=is_anthropic
            )
        await app(scope, receive, send)

    return call


async def _greet(request: Request) -> Response:
    """Where Ollama greets."""
    return PlainTextResponse("Ollama is running")


def create_waiting_app(config: ServerConfig, reason: str) -> ASGIApp:
    """While no model is loaded: the page, and a 503 for all other paths."""
    refusal = Mount("", app=ErrorResponse(NotReady(reason)))
    return RequestLog(Router([*(page_routes() if config.page else ()), refusal]))
