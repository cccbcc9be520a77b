"""Which running server a command talks to when no --url is given. Knows no options.

A server at the default port, or else the one that this user started last. Keys are only sent to
servers that this user started, and to those that --url names: any program can listen on a port.
"""

from __future__ import annotations

import sys

import httpx

from pippin.startup.server_file import running_servers
from pippin.terminal.server_client import ServerClient, ServerError

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
