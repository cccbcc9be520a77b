"""A client that only records: bytes and the time of each read. Parses nothing while it runs.

The client shares the machine with the server it measures, so what it does per token must be
next to nothing: one callback appends one tuple. `sse.py` makes sense of the recording afterwards.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from pippin.bench.errors import BenchError


@dataclass
class Recording:
    """One exchange. `pieces` are reads in order: (time.perf_counter() seconds, bytes)."""

    sent: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    cut: bool = False  # this client disconnected before the end

    @property
    def refused(self) -> bool:
        """Whether the server answered with an error, or not at all."""
        return not self.pieces or b" 200 " not in self.pieces[0][1][:16]


@dataclass(frozen=True)
class Target:
    """A server, and how to address it."""

    url: str
    model: str
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # fields added to every request


class Exchange(asyncio.Protocol):
    """One request on its own connection.

    `first_read`: something arrived; `started`: the first event; `done`: all of it.
    """

    def __init__(self, request: bytes, disconnect_after: int | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._request = request
        self._disconnect_after = disconnect_after  # reads, each about one event
        self._transport: asyncio.Transport | None = None
        self.recording = Recording(sent=perf_counter())
        self.first_read: asyncio.Future[None] = loop.create_future()
        self.started: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[Recording] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.recording.pieces.append((perf_counter(), data))
        if not self.first_read.done():
            self.first_read.set_result(None)
        if not self.started.done() and b"data:" in data:
            self.started.set_result(None)
        if len(self.recording.pieces) == self._disconnect_after:
            self.disconnect()

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self.first_read, self.started):
            if not future.done():  # an error reply, perhaps: the parser reports it
                future.set_result(None)
        if not self.done.done():
            self.done.set_result(self.recording)

    def disconnect(self) -> None:
        assert self._transport is not None
        self.recording.cut = True
        self._transport.abort()


@contextmanager
def without_collections() -> Iterator[None]:
    """A garbage collection in the client would look like a pause of the server."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class LoadClient:
    """Streams completions and chats from one server."""

    def __init__(self, target: Target) -> None:
        self.target = target
        parts = urlsplit(target.url)
        self._host = parts.hostname or "127.0.0.1"
        self._tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")

    async def complete(self, prompt: str, max_tokens: int) -> Recording:
        return await (await self.start_completion(prompt, max_tokens)).done

    async def chat(self, messages: list[dict[str, str]], max_tokens: int) -> Recording:
        fields = {"messages": messages, "max_tokens": max_tokens}
        return await (await self._start("/v1/chat/completions", fields)).done

    async def start_completion(
        self, prompt: str, max_tokens: int, *, disconnect_after: int | None = None, **sampling: Any
    ) -> Exchange:
        """`disconnect_after`: so many reads; `sampling`: more fields."""
        fields = {"prompt": prompt, "max_tokens": max_tokens, **sampling}
        return await self._start("/v1/completions", fields, disconnect_after)

    async def _start(
        self, path: str, fields: dict[str, Any], disconnect_after: int | None = None
    ) -> Exchange:
        body = {
            "model": self.target.model,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
            **self.target.extra,
        }
        return await self._exchange("POST", path, json.dumps(body).encode(), disconnect_after)

    async def start_post(self, path: str, fields: dict[str, Any]) -> Exchange:
        """A request of any dialect, as it is."""
        return await self._exchange("POST", path, json.dumps(fields).encode())

    async def start_get(self, path: str) -> Exchange:
        return await self._exchange("GET", path, b"")

    async def _exchange(
        self, method: str, path: str, body: bytes, disconnect_after: int | None = None
    ) -> Exchange:
        key = self.target.api_key
        head = [
            f"{method} {self._path}{path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",  # the end of the connection is the end of the reply
            *([f"Authorization: Bearer {key}"] if key else []),
        ]
        request = "\r\n".join([*head, "", ""]).encode() + body
        loop = asyncio.get_running_loop()
        try:
            _, exchange = await loop.create_connection(
                lambda: Exchange(request, disconnect_after),
                self._host,
                self._port,
                ssl=self._tls or None,
            )
        except OSError as error:
            raise BenchError(f"{self.target.url}: {error}") from error
        return exchange
