"""The feed and the trace of a real server: a client's own request, and an engine that dies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from processes import PATIENCE_SECONDS
from test_serve import CHAT, serve

pytestmark = pytest.mark.slow

Events = Iterator[tuple[str, Any]]


@contextmanager
def watching(url: str) -> Iterator[Events]:
    with httpx.stream("GET", f"{url}/events") as reply:
        assert reply.status_code == 200
        yield _events(reply)


def _events(reply: httpx.Response) -> Events:
    name = ""
    for line in reply.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def ask(url: str, num_tokens: int = 6) -> dict[str, Any]:
    body = CHAT | {"max_tokens": num_tokens, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body)
    assert reply.status_code == 200
    answer: dict[str, Any] = reply.json()
    return answer


def end_of(events: Events, id: str) -> tuple[dict[str, Any], list[Any]]:
    """What is told of a request at its end, and of all steps until then."""
    steps: list[Any] = []
    for _, data in events:
        steps += data["steps"]
        for request in data["requests"]:
            if request["id"] == f"{id}-0" and request["phase"] == "ended":
                return request, steps
    raise AssertionError("the stream ended before the request did")


def test_a_clients_own_request_is_told_with_its_counts() -> None:
    with serve() as served, watching(served.url) as events:
        name, snapshot = next(events)
        assert (name, snapshot["number"]) == ("snapshot", 0)
        first = ask(served.url)
        told, steps = end_of(events, first["id"])
        usage = first["usage"]
        assert (told["prompt"], told["reply"]) == (usage["prompt_tokens"], 6)
        chunks = [chunk for step in steps for chunk in step["chunks"]]
        assert sum(chunk["tokens"] for chunk in chunks) == usage["prompt_tokens"]
        second = ask(served.url)
        told, _ = end_of(events, second["id"])
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert told["cached"] == cached > 0


def test_watchers_are_told_that_an_engine_died_and_go_on_with_the_next() -> None:
    with serve() as served:
        with watching(served.url) as events:
            assert next(events)[0] == "snapshot"
            ask(served.url)
            os.kill(served.engine_pid, signal.SIGKILL)
            names = []
            for name, data in events:
                names.append(name)
                if name == "engine":
                    assert "SIGKILL" in data["reason"]
                if name == "snapshot":
                    break
            assert names[-2:] == ["engine", "snapshot"]
            told, _ = end_of(events, ask(served.url)["id"])
            assert told["finish"] == "length"
            served.process.terminate()
            for _ in events:  # ends with the server
                pass
        assert served.process.wait(PATIENCE_SECONDS) == 0
