"""`GET /openapi.json`: the routes that there are, and what they take. Knows no field by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

from starlette.routing import BaseRoute, Route

OpenApi = dict[str, Any]
STREAMS = "text/event-stream"

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


def openapi_document(
    routes: Iterable[BaseRoute], bodies: Mapping[str, Any], *, needs_key: bool
) -> OpenApi:
    """`bodies`: schemas of requests' bodies, by path. Others are any object."""
    paths: dict[str, Any] = {}
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            paths.setdefault(route.path_format, {}).update(
                (method.lower(), _operation(route, method, bodies))
                for method in sorted(route.methods or ())
                if method != "HEAD"
            )
    document: OpenApi = {
        "openapi": "3.1.0",
        "info": {"title": "Pippin", "version": version("pippin")},
        "paths": paths,
        "components": {"schemas": {"Error": ERROR_SCHEMA}},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(route: Route, method: str, bodies: Mapping[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{route.path_format.replace('/', '_')}",
        "responses": {"200": {"description": "the answer"}, "default": _error()},
    }
    if route.param_convertors:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
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


def _error() -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": "an error", "content": {"application/json": {"schema": schema}}}
