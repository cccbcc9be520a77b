"""`GET /openapi.json`: the routes, and the tables of their fields. Knows no field by name."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from starlette.convertors import Convertor, IntegerConvertor
from starlette.routing import BaseRoute, Route

from pippin.api.endpoints.batches.batch_routes import BATCHES_PATH
from pippin.api.endpoints.batches.file_routes import FILES_PATH
from pippin.api.endpoints.stored_responses import ITEMS_PATH, RESPONSE_PATH
from pippin.api.fields import anthropic, files, infill, ollama, openai, scoring, tokens
from pippin.api.fields.table import FieldTable
from pippin.api.model_info import RequestRules

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
    "/v1/messages": anthropic.MESSAGES,
    "/v1/messages/count_tokens": anthropic.COUNT_TOKENS,
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
    "/tokenize": tokens.TOKENIZE,
    "/detokenize": tokens.DETOKENIZE,
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
