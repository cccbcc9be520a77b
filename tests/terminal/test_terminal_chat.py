"""The terminal chat, with a speaker that plays back what it is given."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pippin.terminal.chat import HELP, Conversation, reply_of_server
from pippin.terminal.server_client import ServerClient, ServerError

URL = "http://127.0.0.1:9"


class Echo:
    """Answers with how many messages it was shown, in two pieces; interrupts itself on demand."""

    def __init__(self, *, interrupt: bool = False) -> None:
        self.interrupt = interrupt
        self.closed = 0

    def reply(self, messages: list[dict[str, str]]) -> Iterator[str]:
        try:
            yield f"{len(messages)} "
            if self.interrupt:
                raise KeyboardInterrupt
            yield messages[-1]["content"].upper()
        finally:
            self.closed += 1


def talk(*lines: str, speaker: Echo | None = None, system: str | None = None) -> str:
    out = io.StringIO()
    Conversation((speaker or Echo()).reply, out, system).run(iter(lines))
    return out.getvalue()


def test_each_turn_sees_the_ones_before() -> None:
    assert talk("hello", "again") == "1 HELLO\n3 AGAIN\n"


def test_reset_forgets_all_but_the_system_prompt() -> None:
    assert talk("a", "/reset", "b", system="be brief") == "2 A\n2 B\n"


def test_exit_leaves_and_blank_lines_are_passed_over() -> None:
    assert talk("", "a\n", "/exit", "b") == "1 A\n"


def test_an_unknown_command_shows_the_known_ones() -> None:
    assert talk("/what") == f"{HELP}\n"


def test_an_interrupted_reply_is_stopped_and_what_was_said_is_kept() -> None:
    speaker = Echo(interrupt=True)
    assert talk("a", "b", speaker=speaker) == "1  …\n3  …\n"
    assert speaker.closed == 2


def answering(monkeypatch: pytest.MonkeyPatch, *events: str, status: int = 200) -> list[Any]:
    """A server answers so from here on; bodies of what it is sent."""
    bodies: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        bodies.append(json.loads(request.content))
        return httpx.Response(status, text="".join(events))

    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(httpx.Client, "_init_transport", lambda *_, **__: transport)
    return bodies


def event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


def test_a_server_streams_its_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = answering(monkeypatch, event("Hel"), event("lo"), "data: [DONE]\n\n")
    with ServerClient(URL + "/v1") as client:
        reply = reply_of_server(client, {"max_tokens": 5})
        assert list(reply([{"role": "user", "content": "hi"}])) == ["Hel", "lo"]
    (sent,) = bodies
    assert (sent["model"], sent["max_tokens"], sent["stream"]) == ("m", 5, True)


def test_errors_are_the_servers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a reply, and in the middle of one after what arrived."""
    answering(monkeypatch, json.dumps({"error": {"message": "prompt is too long"}}), status=400)
    with ServerClient(URL) as client, pytest.raises(ServerError, match="prompt is too long"):
        list(client.stream_chat({}))
    answering(monkeypatch, event("Hel"), 'data: {"error": {"message": "engine died"}}\n\n')
    with ServerClient(URL) as client:
        reply = client.stream_chat({})
        assert next(reply) == "Hel"
        with pytest.raises(ServerError, match="engine died"):
            next(reply)


def test_a_server_out_of_reach_is_named() -> None:
    with ServerClient(URL) as client, pytest.raises(ServerError, match=r"127\.0\.0\.1:9"):
        client.get("/status")
