"""What every answer has: an id, one line in the log at its end, and errors in a client's shape.

A client's own `x-request-id` is used, if it is printable. Endpoints add what a request was about
(tokens, times): see `RequestRecord.facts`. Errors have OpenAI's shape, unless a path has another.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pippin.errors import PippinError, cut

log = logging.getLogger("pippin.requests")

HEADER = "x-request-id"
IGNORED_HEADER = "x-pippin-ignored"
USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass
class RequestRecord:
    id: str
    method: str = ""
    path: str = ""
    began: float = field(default_factory=perf_counter)
    status: int | None = None  # None: nothing was sent
    error: str | None = None  # its code
    ignored: str = ""  # fields that were, for a header
    facts: Callable[[], dict[str, Any]] = dict  # what it was about, read at its end
    quiet: bool = False  # logged only if it fails
    headers: dict[str, str] = field(default_factory=dict)  # further ones of the response
    at_end: list[Callable[[], None]] = field(default_factory=list)  # called when it was answered

    def fields(self) -> dict[str, Any]:
        fields = {
            "id": self.id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(perf_counter() - self.began, 4),
            "error": self.error,
            **self.facts(),
        }
        return {name: value for name, value in fields.items() if value is not None}


def record_of(scope: Scope) -> RequestRecord:
    record: RequestRecord = scope["state"]["record"]
    return record


class RequestLog:
    """The outermost part of an app: each request ends in one line."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_id_of(scope), scope["method"], scope["path"])
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = record.id
                headers.update(record.headers)
                if record.ignored:
                    headers[IGNORED_HEADER] = record.ignored
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:  # answered with a 500 or by closing; logged here
            record.error = "internal_error"
            log.exception("request %s failed", record.id)
        finally:
            for release in record.at_end:
                release()
            if record.ignored:
                log.debug("request %s: ignored %s", record.id, record.ignored)
            log.log(
                logging.DEBUG if record.quiet and record.error is None else logging.INFO,
                "request",
                extra={"fields": record.fields()},
            )


def _id_of(scope: Scope) -> str:
    given = Headers(scope=scope).get(HEADER, "")
    return given if USABLE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


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
