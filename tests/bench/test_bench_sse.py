"""Recordings are read right however the bytes were cut up on their way."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pippin.bench.client import Recording, parse
from pippin.bench.report import BenchError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 5},
}


def event(text: str | None = None, finish: str | None = None, **fields: Any) -> bytes:
    choices = [{"index": 0, "text": text or "", "finish_reason": finish}]
    return b"data: " + json.dumps({"choices": choices, **fields}).encode() + b"\n\n"


EVENTS = (
    event("One "),
    event("two "),
    event("thrée"),
    event(None, "length"),
    b'data: {"choices": [], "usage": ' + json.dumps(USAGE).encode() + b"}\n\n",
    b"data: [DONE]\n\n",
)


def chunked(*bodies: bytes) -> bytes:
    framed = b"".join(b"%x\r\n%s\r\n" % (len(body), body) for body in bodies)
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


def recorded(*reads: bytes, cut: bool = False) -> Recording:
    """Reads that came one second apart; the request was sent at second 0."""
    return Recording(0.0, [(float(i), data) for i, data in enumerate(reads, start=1)], cut)


def test_a_reply_in_one_read() -> None:
    reply = parse(recorded(chunked(*EVENTS)))
    assert reply.text == "One two thrée"
    assert reply.arrivals == (1.0, 1.0, 1.0)
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (7, 3, 5)


def test_any_cut_gives_the_same_text_and_a_time_no_earlier() -> None:
    raw = chunked(*EVENTS)
    first_event_end = raw.index(EVENTS[0]) + len(EVENTS[0])
    for at in range(1, len(raw)):
        reply = parse(recorded(raw[:at], raw[at:]))
        assert reply.text == "One two thrée"
        assert reply.first == (1.0 if at >= first_event_end else 2.0)


def test_a_stream_without_chunks_and_with_keepalives() -> None:
    head = b"HTTP/1.0 200 OK\r\nContent-type: text/event-stream\r\n\r\n"
    reply = parse(recorded(head + b": keepalive 1/2\n\n", EVENTS[0], EVENTS[1] + EVENTS[2]))
    assert reply.arrivals == (2.0, 3.0, 3.0)
    assert reply.ttft == 2.0
    assert reply.gaps() == [1.0, 0.0]
    assert reply.num_tokens == 3  # no usage: one a chunk


def test_chat_deltas_count_from_the_first_that_has_text() -> None:
    def delta(**fields: str) -> bytes:
        choice = {"index": 0, "delta": fields, "finish_reason": None}
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\r\n\r\n"

    head = HEAD + b"\r\n"
    reply = parse(recorded(head + delta(role="assistant"), delta(content="Hi"), delta(content="!")))
    assert (reply.text, reply.first) == ("Hi!", 2.0)


def test_a_lone_special_token_arrives_with_the_end() -> None:
    reply = parse(recorded(HEAD + b"\r\n", event(None, "length")))
    assert (reply.text, reply.arrivals) == ("", (2.0,))


def test_a_stream_that_we_cut_keeps_what_came() -> None:
    raw = chunked(*EVENTS)
    middle = raw.index(EVENTS[2]) + 5
    assert parse(recorded(raw[:middle], cut=True)).text == "One two "


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "without a reply"),
        (HEAD + b"\r\ndata: [DONE]\n\n", "no tokens"),
        (HEAD + b'\r\ndata: {"error": {"message": "it broke"}}\n\n', "it broke"),
        (b'HTTP/1.1 404 Not Found\r\n\r\n{"error": {"message": "who?"}}', "404 Not Found: who?"),
        (b'HTTP/1.1 400 Bad Request\r\n\r\n{"error": "what?"}', "400 Bad Request: what?"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>", "502 Bad Gateway: <html>"),
    ],
)
def test_what_is_no_reply_is_said(raw: bytes, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        parse(recorded(raw))
