"""An HTTP proxy between an agent and the server that changes bodies. Knows no agent."""

from __future__ import annotations

import http.client
import json
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Change = Callable[[str, dict[str, Any]], dict[str, Any]]
_REQUEST_ID = "x-request-id"
_HOP_BY_HOP = {_REQUEST_ID, "host", "content-length", "connection", "transfer-encoding"}
_HOP_BY_HOP |= {"accept-encoding"}


@dataclass
class Exchange:
    """A request that generates, as the client sent it, and the status of its reply."""

    id: str  # in the server's log
    path: str
    sent: dict[str, Any]
    status: int = 0
    error: str = ""


@dataclass
class ForcingProxy:
    """Listens on a port of its own while it is entered."""

    server_url: str
    change: Change
    exchanges: list[Exchange] = field(default_factory=list)

    def __enter__(self) -> ForcingProxy:
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    proxy: ForcingProxy

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_HEAD(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        path = urlsplit(self.path).path
        try:
            fields = json.loads(body)
        except ValueError:
            return self._pass_on(body)
        changed = self.proxy.change(path, fields)
        if changed is fields:
            return self._pass_on(body)
        exchange = Exchange(f"exchange-{uuid.uuid4().hex}", path, fields)
        self.proxy.exchanges.append(exchange)
        return self._pass_on(json.dumps(changed).encode(), exchange)

    def _pass_on(self, body: bytes | None, exchange: Exchange | None = None) -> None:
        kept = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP}
        if exchange is not None:
            kept[_REQUEST_ID] = exchange.id
        server = http.client.HTTPConnection(urlsplit(self.proxy.server_url).netloc)
        server.request(self.command, self.path, body, kept)
        reply = server.getresponse()
        if exchange is not None:
            exchange.status = reply.status
        try:
            first = self._return(reply)
        except (BrokenPipeError, ConnectionResetError):  # the agent has exited, or needs no more
            first = b""
        server.close()
        self.close_connection = True
        if exchange is not None and reply.status >= 400:
            exchange.error = first.decode(errors="replace")

    def _return(self, reply: http.client.HTTPResponse) -> bytes:
        """What came first of the reply's body."""
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in _HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        first = b""
        while piece := reply.read1(65536):
            first = first or piece
            self.wfile.write(piece)
            self.wfile.flush()
        return first

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: the table does."""
