"""A small client of a running server, for the terminal commands. Knows only HTTP."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx

from pippin.errors import PippinError

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

    def get(self, path: str) -> dict[str, Any]:
        return self._json("GET", path)

    def post(self, path: str) -> dict[str, Any]:
        return self._json("POST", path)

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

    def _json(self, method: str, path: str) -> dict[str, Any]:
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
