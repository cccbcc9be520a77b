"""Errors as clients expect them: OpenAI's shape, unless a path has another. Knows no engine.

PippinError (see `pippin.errors`)
├── ModelNotFound         404
├── Unauthorized          401  no key, or the wrong one
├── Forbidden             403  a Host or an Origin that is not accepted
│   └── AdminOnly              an API key, where an admin key is needed
├── TooSlow               408  the head or the body of a request arrived too slowly
├── DeadlinePassed        408  the reply was not complete in time
├── BodyTooLarge              413
├── WrongMediaType        415
├── TooManyConnections    429
├── TooManyBodies         429
└── HeadTooLarge          431
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pippin.api.http.request_log import record_of
from pippin.errors import NotFound, PippinError, cut

CLIENT_CLOSED_REQUEST = 499  # nginx's number, for the log


class ModelNotFound(NotFound):
    code = "model_not_found"


class Unauthorized(PippinError):
    status = 401
    code = "invalid_api_key"


class Forbidden(PippinError):
    status = 403
    code = "forbidden"


class AdminOnly(Forbidden):
    code = "admin_key_required"


class TooSlow(PippinError):
    status = 408
    code = "request_too_slow"


class DeadlinePassed(PippinError):
    status = 408
    code = "deadline_passed"


class BodyTooLarge(PippinError):
    status = 413
    code = "request_too_large"


class WrongMediaType(PippinError):
    status = 415
    code = "unsupported_media_type"


class HeadTooLarge(PippinError):
    status = 431
    code = "request_head_too_large"


class TooManyConnections(PippinError):
    status = 429
    code = "too_many_connections"
    retry_after_s = 1


class TooManyBodies(PippinError):
    status = 429
    code = "too_many_request_bodies"
    retry_after_s = 1


class JSONResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


ErrorShape = Callable[[PippinError], dict[str, Any]]


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request has the header that all of Anthropic's clients send."""
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


class ErrorShapes:
    """Sets the shape of errors below some paths, also of those before a route is called.

    Below those of `shared` it is only for Anthropic's clients.
    """

    def __init__(
        self, app: ASGIApp, shapes: Mapping[str, ErrorShape], shared: Mapping[str, ErrorShape]
    ) -> None:
        self._app = app
        self._shapes = shapes
        self._shared = shared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            shapes = {**self._shapes, **(self._shared if speaks_anthropic(scope) else {})}
            for path, shape in shapes.items():
                if f"{scope['path']}/".startswith(f"{path}/"):
                    scope["state"]["error_shape"] = shape
        await self._app(scope, receive, send)


class ErrorResponse(JSONResponse):
    """Any error, in the shape of its path or else OpenAI's; the request's log line has its code."""

    def __init__(self, error: PippinError, headers: dict[str, str] | None = None) -> None:
        self._error = error
        super().__init__(error_body(error), error.status, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).error = self._error.code
        if (shape := scope["state"].get("error_shape")) is not None:
            self.body = self.render(shape(self._error))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_body(error: PippinError) -> dict[str, Any]:
    """OpenAI's shape."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    fields = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": fields}


def error_response(error: PippinError) -> ErrorResponse:
    return ErrorResponse(error, _headers(error))


def internal_error() -> PippinError:
    return PippinError(
        "internal error; the server's log has the details under this request's x-request-id"
    )


async def on_error(request: Request, error: Exception) -> Response:
    match error:
        case PippinError():
            return error_response(error)
        case HTTPException():  # starlette's own: no such route, wrong method
            shown = PippinError(f"{error.detail}: {request.method} {cut(request.url.path)}")
            shown.status, shown.code = error.status_code, error.detail.lower().replace(" ", "_")
            return ErrorResponse(shown, dict(error.headers or {}))
        case ClientDisconnect():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
    return error_response(internal_error())  # `RequestLog` gets the error too, and logs it


ERROR_HANDLERS: dict[Any, Any] = dict.fromkeys(
    (PippinError, HTTPException, ClientDisconnect, Exception), on_error
)


def _headers(error: PippinError) -> dict[str, str]:
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, DeadlinePassed):  # a second try would take as long
        headers["x-should-retry"] = "false"
    return headers
