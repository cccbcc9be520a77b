"""The terminal chat, with a speaker that plays back what it is given."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pippin.terminal.chat import HELP, Conversation, reply_of_server
from pippin.terminal.server_client import ServerClient, ServerError


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


@contextmanager
def http_server(chunks: list[str], status: int = 200) -> Iterator[tuple[str, list[bytes]]]:
    """A server that streams the given events to every POST and notes the bodies."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(b'{"data": [{"id": "m"}]}', 200)

        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer("".join(chunks).encode(), status)

        def answer(self, body: bytes, code: int) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


def test_a_server_streams_its_reply() -> None:
    events = [event("Hel"), event("lo"), "data: [DONE]\n\n"]
    with http_server(events) as (url, bodies), ServerClient(url + "/v1") as client:
        reply = reply_of_server(client, {"max_tokens": 5})
        assert list(reply([{"role": "user", "content": "hi"}])) == ["Hel", "lo"]
    sent = json.loads(bodies[0])
    assert (sent["model"], sent["max_tokens"], sent["stream"]) == ("m", 5, True)


def test_a_servers_error_is_its_message() -> None:
    body = json.dumps({"error": {"message": "prompt is too long"}})
    with (
        http_server([body], status=400) as (url, _),
        ServerClient(url) as client,
        pytest.raises(ServerError, match="prompt is too long"),
    ):
        list(client.stream_chat({}))


def test_an_error_in_the_stream_is_raised_after_what_came_before() -> None:
    broken = 'data: {"error": {"message": "engine died"}}\n\n'
    with http_server([event("Hel"), broken]) as (url, _), ServerClient(url) as client:
        reply = client.stream_chat({})
        assert next(reply) == "Hel"
        with pytest.raises(ServerError, match="engine died"):
            next(reply)


def test_a_server_out_of_reach_is_named() -> None:
    with (
        ServerClient("http://127.0.0.1:9") as client,
        pytest.raises(ServerError, match=r"127\.0\.0\.1:9"),
    ):
        client.get("/status")
