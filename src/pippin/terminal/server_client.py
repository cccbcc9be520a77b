"""A small client of a running server, for the terminal commands."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import httpx

from pippin.errors import PippinError
from pippin.startup.server_file import running_servers

TIMEOUT = httpx.Timeout(10.0, read=600.0)  # a busy server may queue a request for long


class ServerError(PippinError):
    """The server cannot be reached, or returned an error."""


class ServerClient:
    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.api_key = api_key
        self.url = url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT)

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def stream_chat(self, body: dict[str, Any]) -> Iterator[str]:
        """The text of one reply as it arrives. Closing the iterator aborts the request."""
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise ServerError(_message(response))
                for line in response.iter_lines():
                    yield from _texts(line)
        except httpx.TransportError as error:
            raise ServerError(f"no answer from {self.url}: {error}") from error

    def get(self, path: str, method: str = "GET") -> dict[str, Any]:
        try:
            response = self._http.request(method, path)
        except httpx.TransportError as error:
            raise ServerError(f"no answer from {self.url}: {error}") from error
        if response.is_error:
            raise ServerError(_message(response))
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ServerError(
                f"{response.request.url} did not return a JSON object: is it a Pippin server?"
            )
        return answer


def _texts(line: str) -> Iterator[str]:
    """The content in one line of an event stream."""
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return
    chunk = json.loads(data)
    if "error" in chunk:
        raise ServerError(chunk["error"]["message"])
    for choice in chunk.get("choices", []):
        if text := choice["delta"].get("content"):
            yield text


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.request.url} returned HTTP {response.status_code}"


def api_key_of_environment() -> str | None:
    """The first of the keys that a server with the same environment accepts."""
    return next(iter(os.environ.get("PIPPIN_API_KEY", "").split()), None)


def admin_key_of_environment() -> str | None:
    """The same for admin routes; a server's only API key is its admin key."""
    admins = os.environ.get("PIPPIN_ADMIN_KEY", "").split()
    return next(iter(admins), None) or api_key_of_environment()


DEFAULT_URL = "http://127.0.0.1:8000"
PROBE_SECONDS = 2.0


class NoServer(ServerError):
    """There is none to talk to."""


def connect(url: str | None, key: str | None) -> ServerClient:
    """A client of the server at `url`, or of the one that is found."""
    if url is not None:
        return ServerClient(url, key)
    started = running_servers()
    own = next((server for server in started if server.url == DEFAULT_URL), None)
    if own is None and _is_ready(DEFAULT_URL):
        if key is not None:
            _note(f"no key is sent to {DEFAULT_URL}, which you did not start: --url sends it")
        return ServerClient(DEFAULT_URL)
    if own is None and started:
        own = started[0]
    if own is None:
        raise NoServer(
            f"no running server was found at {DEFAULT_URL} or among those that you started: start "
            "one with `pippin serve MODEL`, or name one with --url"
        )
    if own.url != DEFAULT_URL or len(started) > 1:
        _note(f"using {own.model} at {own.url}; --url chooses another server")
    return ServerClient(own.url, key)


def _is_ready(url: str) -> bool:
    """Whether a server of Pippin is there. One that still loads its model is an error."""
    try:
        response = httpx.get(f"{url}/ready", timeout=PROBE_SECONDS)
        answer = response.json()
    except (httpx.TransportError, ValueError):  # none, or of something else
        return False
    if not isinstance(answer, dict):
        return False
    error = answer.get("error")
    if isinstance(error, dict) and error.get("code") == "not_ready":
        raise ServerError(f"the server at {url} is not ready: {error.get('message')}; try again")
    return answer.get("status") == "ready"


def _note(text: str) -> None:
    print(f"pippin: {text}", file=sys.stderr)
