"""Errors as clients expect them: OpenAI's shape, unless a path has another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pippin.api.http.request_log import record_of
from pippin.errors import PippinError, cut

CLIENT_CLOSED_REQUEST = 499  # nginx's number, for the log
HEADERS = {  # of errors with these codes
    "invalid_api_key": {"www-authenticate": "Bearer"},
    "deadline_passed": {"x-should-retry": "false"},  # a second try would take as long
}

ErrorShape = Callable[[PippinError], dict[str, Any]]


class JSONResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class ErrorResponse(JSONResponse):
    """Any error, in the shape of its path or else OpenAI's; the request's log line has its code."""

    def __init__(self, error: PippinError, headers: dict[str, str] | None = None) -> None:
        self._error = error
        headers = {**(headers or {}), **HEADERS.get(error.code, {})}
        if error.retry_after_s is not None:
            headers["retry-after"] = str(error.retry_after_s)
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


def internal_error() -> PippinError:
    return PippinError(
        "internal error; the server's log has the details under this request's x-request-id"
    )


async def on_error(request: Request, error: Exception) -> Response:
    match error:
        case PippinError():
            return ErrorResponse(error)
        case HTTPException():  # starlette's own: no such route, wrong method
            message = f"{error.detail}: {request.method} {cut(request.url.path)}"
            code = error.detail.lower().replace(" ", "_")
            shown = PippinError(message, code=code, status=error.status_code)
            return ErrorResponse(shown, dict(error.headers or {}))
        case ClientDisconnect():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
    return ErrorResponse(internal_error())  # `RequestLog` gets the error too, and logs it


ERROR_HANDLERS: dict[Any, Any] = dict.fromkeys(
    (PippinError, HTTPException, ClientDisconnect, Exception), on_error
)
