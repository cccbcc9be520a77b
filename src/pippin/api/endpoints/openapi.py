"""`GET /openapi.json`: the routes that there are, and what they take. Knows no field by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from starlette.convertors import Convertor, IntegerConvertor
from starlette.routing import BaseRoute, Route

OpenApi = dict[str, Any]
STREAMS = "text/event-stream"
ALWAYS_STREAM = frozenset({"/events"})

ERROR_SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


# Anthropic's shape.
MESSAGES_ERROR_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
    },
    "required": ["type", "error"],
}


def openapi_document(
    routes: Iterable[BaseRoute],
    bodies: Mapping[str, Any],
    queries: Mapping[str, Mapping[str, Any]],
    *,
    needs_key: bool,
) -> OpenApi:
    """`bodies` and `queries`: what requests hold, by path."""
    paths: dict[str, Any] = {}
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            paths.setdefault(route.path_format, {}).update(
                (method.lower(), _operation(route, method, bodies, queries))
                for method in sorted(route.methods or ())
                if method != "HEAD"
            )
    document: OpenApi = {
        "openapi": "3.1.0",
        "info": {"title": "Pippin", "version": version("pippin")},
        "paths": paths,
        "components": {"schemas": {"Error": ERROR_SCHEMA, "MessagesError": MESSAGES_ERROR_SCHEMA}},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(
    route: Route, method: str, bodies: Mapping[str, Any], queries: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{route.path_format.replace('/', '_')}",
        "responses": {"200": {"description": "the answer"}, "default": _error(route.path)},
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _path_schema(convertor)}
        for name, convertor in route.param_convertors.items()
    ]
    if method == "GET":
        parameters += [
            {"name": name, "in": "query", "schema": schema}
            for name, schema in queries.get(route.path, {}).items()
        ]
    if parameters:
        operation["parameters"] = parameters
    if route.path in ALWAYS_STREAM:
        operation["responses"]["200"]["content"] = {STREAMS: {}}
    body = bodies.get(route.path)
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
        replies: dict[str, Any] = {"application/json": {}}
        if "stream" in body["properties"]:
            replies[STREAMS] = {}
        operation["responses"]["200"]["content"] = replies
    return operation


def _path_schema(convertor: Convertor[Any]) -> dict[str, Any]:
    if isinstance(convertor, IntegerConvertor):
        return {"type": "integer", "minimum": 0}
    return {"type": "string"}


def _error(path: str) -> dict[str, Any]:
    name = "MessagesError" if path.startswith("/v1/messages") else "Error"
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"description": "an error", "content": {"application/json": {"schema": schema}}}
