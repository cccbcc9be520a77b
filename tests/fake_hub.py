"""A Hugging Face hub on this machine: a few models, as huggingface_hub asks for them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = b'{"model_type": "llama"}'
MODEL = "some/model"
FILES = {
    "config.json": CONFIG,
    "model.safetensors": b"w" * 100_000,
    "README.md": b"not read",
    "pytorch_model.bin": b"p" * 10,
    "original/params.json": b"{}",
}


@dataclass
class FakeHub:
    url: str = ""
    models: dict[str, dict[str, bytes]] = field(default_factory=lambda: {MODEL: FILES})
    gated: set[str] = field(default_factory=set)
    paths: list[str] = field(default_factory=list)  # that were asked for
    stalls: threading.Event = field(default_factory=threading.Event)  # weights stop half-way
    ended: threading.Event = field(default_factory=threading.Event)  # of the fake itself

    def environment(self, cache: Path) -> dict[str, str]:
        """For a process that uses this hub and a cache of its own."""
        off = dict.fromkeys(("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY"), "1")
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache.parent),
            "HF_HUB_CACHE": str(cache),
            **off,
        }

    def use(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """The same for this process, whose library has read its environment already, and for its
        children."""
        from huggingface_hub import constants

        for name, value in self.environment(cache).items():
            monkeypatch.setenv(name, value)
        files = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.url + files)
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        hub.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.paths.append(f"{self.command} {path}")
            words = path.strip("/").split("/")
            if words[:2] == ["api", "models"]:
                name, what, revision = "/".join(words[2:4]), words[4], words[5]
            else:
                name, what, revision = "/".join(words[:2]), words[2], words[3]
            if name not in hub.models:
                self.answer(401, b"", "RepoNotFound")
            elif revision not in ("main", COMMIT):
                self.answer(404, b"", "RevisionNotFound")
            elif what == "revision":
                self.json({"id": name, "sha": COMMIT, "siblings": []})
            elif what == "tree":
                files = hub.models[name].items()
                self.json(
                    [
                        {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
                        for path, data in files
                    ]
                )
            elif name in hub.gated:
                self.answer(403, b"", "GatedRepo")
            else:
                self.file(hub.models[name]["/".join(words[4:])])

        def json(self, value: object) -> None:
            self.answer(200, json.dumps(value).encode())

        def file(self, data: bytes) -> None:
            self.send_response(200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{_etag(data)}"')
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "HEAD":
                return
            half = len(data) // 2
            self.wfile.write(data[:half])
            if hub.stalls.is_set() and half > 1000:
                hub.ended.wait()
            else:
                self.wfile.write(data[half:])

        def answer(self, status: int, body: bytes, error: str = "") -> None:
            self.send_response(status)
            if error:
                self.send_header("X-Error-Code", error)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
