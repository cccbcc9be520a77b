"""The endpoints about the server: its model, health, status, cache and OpenAPI document.

Knows no field of any request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from starlette.convertors import Convertor, IntegerConvertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pippin.api.batches import routes as files
from pippin.api.batches.routes import BATCHES_PATH, FILES_PATH
from pippin.api.dialects import infill, messages, ollama
from pippin.api.endpoints import scoring, tokenize
from pippin.api.endpoints.app_state import AppState
from pippin.api.endpoints.stored_responses import ITEMS_PATH, RESPONSE_PATH
from pippin.api.fields import openai
from pippin.api.fields.table import FieldTable
from pippin.api.http.access_control import shows_prompts
from pippin.api.http.http_errors import JSONResponse, speaks_anthropic
from pippin.api.model_info import ModelInfo, RequestRules
from pippin.config.server import event_address
from pippin.errors import NotReady
from pippin.types import GRID

OpenApi = dict[str, Any]
STREAMS = "text/event-stream"
JSON_LINES = "application/x-ndjson"  # of the paths below /api
ALWAYS_STREAM = frozenset({"/events"})


def _required(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_STRING = {"type": "string"}
ERROR_SCHEMA = _required(
    error=_required(
        message=_STRING,
        type={"enum": ["invalid_request_error", "server_error"]},
        param={"type": ["string", "null"]},
        code=_STRING,
    )
)
MESSAGES_ERROR_SCHEMA = _required(  # Anthropic's
    type={"const": "error"}, error=_required(type=_STRING, message=_STRING)
)
OLLAMA_ERROR_SCHEMA = _required(error=_STRING)
_ERRORS = {
    "Error": ERROR_SCHEMA,
    "MessagesError": MESSAGES_ERROR_SCHEMA,
    "OllamaError": OLLAMA_ERROR_SCHEMA,
}
_ERROR_NAMES = {"/v1/messages": "MessagesError", "/api/": "OllamaError"}  # by a path's start
BODIES = {  # by path
    "/v1/chat/completions": openai.CHAT,
    "/v1/completions": openai.COMPLETION,
    "/infill": infill.INFILL,
    "/v1/responses": openai.RESPONSES,
    "/v1/responses/input_tokens": openai.INPUT_TOKENS,
    "/v1/messages": messages.MESSAGES,
    "/v1/messages/count_tokens": messages.COUNT_TOKENS,
    "/v1/embeddings": openai.EMBEDDINGS,
    BATCHES_PATH: files.BATCH,
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), scoring.RERANK),
    **dict.fromkeys(("/v1/score", "/score"), scoring.SCORE),
    "/api/chat": ollama.CHAT,
    "/api/generate": ollama.GENERATE,
    "/api/embed": ollama.EMBED,
    "/api/embeddings": ollama.EMBEDDINGS,
    "/api/show": ollama.SHOW,
    "/api/copy": ollama.COPY,
    "/api/pull": ollama.PULL,
    "/tokenize": tokenize.TOKENIZE,
    "/detokenize": tokenize.DETOKENIZE,
}
FORMS = {FILES_PATH: files.UPLOAD}  # with a file
QUERIES = {
    RESPONSE_PATH: openai.STORED_RESPONSE,
    ITEMS_PATH: openai.STORED_ITEMS,
    FILES_PATH: files.FILE_LIST,
    BATCHES_PATH: files.BATCH_LIST,
}


def openapi_document(
    routes: Iterable[BaseRoute], rules: RequestRules, *, needs_key: bool
) -> OpenApi:
    paths: dict[str, Any] = {}
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            paths.setdefault(route.path_format, {}).update(
                (method.lower(), _operation(route, method, rules))
                for method in sorted(route.methods or ())
                if method != "HEAD"
            )
    document: OpenApi = {
        "openapi": "3.1.0",
        "info": {"title": "Pippin", "version": version("pippin")},
        "paths": paths,
        "components": {"schemas": dict(_ERRORS)},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(route: Route, method: str, rules: RequestRules) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{route.path_format.replace('/', '_')}",
        "responses": {"200": {"description": "the answer"}, "default": _error(route.path)},
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _path_schema(convertor)}
        for name, convertor in route.param_convertors.items()
    ]
    if method == "GET" and route.path in QUERIES:
        parameters += [
            {"name": name, "in": "query", "schema": kind.schema(rules)}
            for name, kind in QUERIES[route.path].fields.items()
        ]
    if parameters:
        operation["parameters"] = parameters
    if route.path in ALWAYS_STREAM:
        operation["responses"]["200"]["content"] = {STREAMS: {}}
    if method == "POST" and route.path in FORMS:
        operation["requestBody"] = _form(FORMS[route.path], rules)
    if method == "POST" and route.path in BODIES:
        body = BODIES[route.path].schema(rules)
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
        replies: dict[str, Any] = {"application/json": {}}
        if "stream" in body["properties"]:
            replies[JSON_LINES if route.path.startswith("/api/") else STREAMS] = {}
        operation["responses"]["200"]["content"] = replies
    return operation


def _form(table: FieldTable, rules: RequestRules) -> dict[str, Any]:
    fields = {name: kind.schema(rules) for name, kind in table.fields.items()}
    schema = _required(**fields, file={"type": "string", "format": "binary"})
    schema |= {"required": [*table.required, "file"], "additionalProperties": False}
    return {"required": True, "content": {"multipart/form-data": {"schema": schema}}}


def _path_schema(convertor: Convertor[Any]) -> dict[str, Any]:
    if isinstance(convertor, IntegerConvertor):
        return {"type": "integer", "minimum": 0}
    return {"type": "string"}


def _error(path: str) -> dict[str, Any]:
    name = next((n for start, n in _ERROR_NAMES.items() if path.startswith(start)), "Error")
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": "an error", "content": {"application/json": {"schema": schema}}}


class ServerInfo:
    def __init__(self, state: AppState) -> None:
        self._state = state
        self._served = state.models

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self._models),
            Route("/v1/models/{id:path}", self._one_model),
            Route("/get_model_info", self._model_info),
            Route("/model_info", self._model_info),  # SGLang's newer name of it
            Route("/get_server_info", self._server_info),
            Route("/server_info", self._server_info),  # SGLang's newer name of it
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/status", self._status),
            Route("/flush_cache", self._flush_cache, methods=["POST"]),
            Route("/restart_replicas", self._restart_replicas, methods=["POST"]),
            Route("/openapi.json", self._openapi),
        ]

    async def _models(self, request: Request) -> Response:
        listed = [(name, model.info) for model in self._served for name in model.info.names]
        if speaks_anthropic(request.scope):
            models = [_anthropic_model(name, info) for name, info in listed]
            page = {"has_more": False, "first_id": listed[0][0], "last_id": listed[-1][0]}
            return JSONResponse({"data": models, **page})
        data = [_openai_model(name, info) for name, info in listed]
        return JSONResponse({"object": "list", "data": data})

    async def _one_model(self, request: Request) -> Response:
        id = request.path_params["id"]
        describe = _anthropic_model if speaks_anthropic(request.scope) else _openai_model
        return JSONResponse(describe(id, self._served.get(id).info))

    async def _model_info(self, request: Request) -> Response:
        """Names, not paths: clients have no use for the server's paths."""
        model = self._state.model_of(request).info
        return JSONResponse(
            {
                "model_path": model.name,
                "tokenizer_path": model.name,
                "served_model_name": model.name,
                "is_generation": True,
                "preferred_sampling_params": None,
                "max_model_len": model.max_len,
                "vocab_size": model.vocab_size,
                "has_image_understanding": False,
                "has_audio_understanding": False,
            }
        )

    async def _server_info(self, request: Request) -> Response:
        """What SGLang's routers read when they add this server."""
        model = self._state.model_of(request).info
        return JSONResponse(
            {
                "model_path": model.name,
                "served_model_name": model.name,
                "tp_size": 1,
                "dp_size": self._state.config.num_replicas,
                "disaggregation_mode": "null",  # a word of SGLang's
                "speculative_algorithm": None,  # blocks are hashed token by token
                "max_total_tokens": model.max_len,
                "kv_events": self._kv_events(),
            }
        )

    def _kv_events(self) -> dict[str, Any] | None:
        address = self._state.config.kv_events
        if address is None:
            return None
        host, port = event_address("kv_events", address)
        return {
            "publisher": "zmq",
            "endpoint_host": host,
            "endpoint_port_base": port,
            "topic": "kv-events",
            "block_size": GRID,
            "dp_size": self._state.config.num_replicas,
        }

    async def _health(self, request: Request) -> Response:
        """Healthy: some model is served, or would be loaded for a request."""
        engines = [model.engine for model in self._served]
        lost = [engine for engine in engines if engine is not None and not engine.healthy]
        if lost and len(lost) == len(engines):
            raise NotReady(lost[0].reason or "the engine is not running")
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        self._served.check_ready()
        return JSONResponse({"status": "ready"})

    async def _status(self, request: Request) -> Response:
        if self._served.default.info.on_demand and "model" not in request.query_params:
            states = {model.info.name: asdict(model.residency) for model in self._served}
            return JSONResponse({"models": states})
        status = await self._state.engine_of(request).status()
        if (cache := status.get("cache")) is None:
            return JSONResponse(status)
        if not self._state.admins.admit(request.scope):
            del cache["recent_paths"]
        elif not shows_prompts(self._state.config):
            for path in cache["recent_paths"]:
                del path["first_tokens"], path["last_tokens"]
        return JSONResponse(status)

    async def _flush_cache(self, request: Request) -> Response:
        self._state.admins.check(request.scope)
        return JSONResponse(await self._state.engine_of(request).flush_cache())

    async def _restart_replicas(self, request: Request) -> Response:
        """It may take as long as the longest reply: /status has the state of each replica."""
        self._state.admins.check(request.scope)
        self._state.engine_of(request).restart()
        return JSONResponse({"status": "restarting"}, status_code=202)

    async def _openapi(self, request: Request) -> Response:
        needs_key = bool(self._state.config.api_key)
        routes, rules = request.app.routes, self._state.rules
        return JSONResponse(openapi_document(routes, rules, needs_key=needs_key))


def _openai_model(name: str, model: ModelInfo) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "pippin",
        "root": model.name,  # vLLM's: of an alias, the name of its model
        "max_model_len": model.max_len,
        "input_modalities": ["text"],
        **_unserved(model),
    }


def _unserved(model: ModelInfo) -> dict[str, Any]:
    kinds = model.checkpoint.unserved
    return {"unserved_modalities": list(kinds)} if kinds else {}


def _anthropic_model(name: str, model: ModelInfo) -> dict[str, Any]:
    created = datetime.fromtimestamp(model.created_s, UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.max_len,
        "max_tokens": model.max_len,
        **_unserved(model),
    }
