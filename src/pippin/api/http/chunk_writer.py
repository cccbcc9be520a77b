"""Writes parts of a streamed body straight to their connection. Knows no reply.

By ASGI a part passes the `send` of every middleware and a check by h11: that costs more than the
rest of a token. A chunk of HTTP/1.1 is its length and its bytes. The head and the end of a reply
are sent by ASGI, which keeps h11's state: a chunk does not change it.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

EXTENSION = "pippin.chunk_writer"


class ChunkWriter:
    """Of one request, whose head is sent before the first chunk."""

    def __init__(self, connection: H11Protocol) -> None:
        self._cycle = connection.cycle
        self._flow = connection.flow
        self._transport = connection.transport

    @staticmethod
    def of(scope: Scope) -> ChunkWriter | None:
        """None where bodies have no chunks: in HTTP/1.0, and without a connection of ours."""
        writer: ChunkWriter | None = scope.get("extensions", {}).get(EXTENSION)
        return writer

    @property
    def is_paused(self) -> bool:
        """Whether the client is behind by more than the connection buffers."""
        return self._flow.write_paused and not self._cycle.disconnected

    async def drained(self) -> None:
        await self._flow.drain()

    def write(self, body: bytes) -> None:
        """Nothing, once the client has disconnected. An empty chunk would end the body."""
        if body and not self._cycle.disconnected:
            self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def with_chunk_writer(app: ASGIApp, connection: H11Protocol) -> ASGIApp:
    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["http_version"] == "1.1" and scope["method"] != "HEAD":
            scope["extensions"] = {EXTENSION: ChunkWriter(connection)}
        await app(scope, receive, send)

    return call
