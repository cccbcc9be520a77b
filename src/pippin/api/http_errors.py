"""Errors as OpenAI clients expect them: one JSON shape for every status. Knows no engine."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pippin.errors import NotFound, PippinError

log = logging.getLogger(__name__)


class ModelNotFound(NotFound):
    code = "model_not_found"


class Unauthorized(PippinError):
    status = 401
    code = "invalid_api_key"


class JSONResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_body(error: PippinError) -> dict[str, Any]:
    return _body(error.message, error.status, param=error.param, code=error.code)


def error_response(error: PippinError) -> JSONResponse:
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


def on_pippin_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PippinError)
    return error_response(error)


def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, wrong method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    code = error.detail.lower().replace(" ", "_")
    body = _body(message, error.status_code, param=None, code=code)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


def on_unexpected(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return JSONResponse(
        _body(
            "the server made a mistake; its log says more", 500, param=None, code="internal_error"
        ),
        status_code=500,
    )


def _body(message: str, status: int, *, param: str | None, code: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
