"""Sends the body of a line through the app that answers HTTP requests. Knows no batch.

What a line means, what is refused and what an error says is the endpoint's. No connection, no
access control: the owner was checked when the batch was created.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

from pippin.api.http.request_log import RequestLog, record_of
from pippin.errors import DeviceFailed, EngineDead, NotReady, Overloaded

TRIED_AGAIN = {error.code for error in (Overloaded, NotReady, EngineDead, DeviceFailed)}
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0  # before a line is tried again


@dataclass(frozen=True)
class Answer:
    status: int
    request_id: str
    body: msgspec.Raw  # JSON

    def wire(self) -> dict[str, Any]:
        return {"status_code": self.status, "request_id": self.request_id, "body": self.body}


class LineClient:
    def __init__(self, app: ASGIApp) -> None:
        self._app = RequestLog(app)

    async def ask(self, path: str, body: bytes, owner: Mapping[str, Any]) -> Answer:
        """The answer, after as many tries as the engine is full or absent. `owner`: see
        `access_control.owner_state`."""
        for wait_s in _waits():
            scope = _scope(path, owner)
            answer = await self._try(scope, body)
            if record_of(scope).error not in TRIED_AGAIN:
                return answer
            await asyncio.sleep(wait_s)
        raise AssertionError("waits do not end")

    async def _try(self, scope: Scope, body: bytes) -> Answer:
        unread = [{"type": "http.request", "body": body, "more_body": False}]
        sent = bytearray()
        status = 500  # if nothing is sent

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await asyncio.Event().wait()  # no client disconnects
            raise AssertionError("nothing sets it")

        async def send(message: Message) -> None:
            nonlocal status, sent
            status = message.get("status", status)
            sent += message.get("body", b"")

        await self._app(scope, receive, send)
        return Answer(status, record_of(scope).id, msgspec.Raw(bytes(sent) or b"null"))


def _waits() -> Iterator[float]:
    wait_s = FIRST_WAIT_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def _scope(path: str, owner: Mapping[str, Any]) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        "state": dict(owner),
    }
