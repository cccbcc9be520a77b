"""Reads recordings: HTTP framing, event streams, the chunks of a reply and when each came.

Knows the wire format of OpenAI streams; knows no sockets and no clock.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pippin.bench.client.wire import Recording
from pippin.bench.errors import BenchError

Timed = tuple[float, bytes]


@dataclass(frozen=True)
class TimedReply:
    """One streamed reply. Times are seconds on the recording's clock."""

    sent: float
    arrivals: tuple[float, ...]  # of each chunk that carried text, or of the end if none did
    text: str
    prompt_tokens: int | None = None  # as the server counts them
    completion_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def first(self) -> float:
        return self.arrivals[0]

    @property
    def last(self) -> float:
        return self.arrivals[-1]

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def num_tokens(self) -> int:
        """Generated tokens; a server that does not count them sends one a chunk."""
        return self.completion_tokens or len(self.arrivals)

    def gaps(self, since: float = float("-inf"), until: float = float("inf")) -> list[float]:
        """Seconds between chunks, for those gaps that end within the period."""
        pairs = itertools.pairwise(self.arrivals)
        return [after - before for before, after in pairs if since <= after <= until]


def parse(recording: Recording) -> TimedReply:
    """The reply in a recording; raises BenchError for anything that is not one."""
    arrivals: list[float] = []
    texts: list[str] = []
    usage: dict[str, Any] = {}
    for time, event in _events(recording):
        usage = event.get("usage") or usage
        text = "".join(_texts(event))
        if text or (_finishes(event) and not arrivals):  # a lone special token has no text
            arrivals.append(time)
            texts.append(text)
    if not arrivals:
        raise BenchError("the server's reply has no tokens")
    details = usage.get("prompt_tokens_details") or {}
    return TimedReply(
        sent=recording.sent,
        arrivals=tuple(arrivals),
        text="".join(texts),
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        cached_tokens=details.get("cached_tokens"),
    )


def _texts(event: dict[str, Any]) -> Iterator[str]:
    if "error" in event:
        raise BenchError(f"the server failed a request: {_error_message(event)}")
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        for text in (choice.get("text"), delta.get("content"), delta.get("reasoning")):
            if text:
                yield text


def _finishes(event: dict[str, Any]) -> bool:
    return any(choice.get("finish_reason") for choice in event.get("choices") or [])


def _events(recording: Recording) -> Iterator[tuple[float, dict[str, Any]]]:
    """The JSON of each `data:` line, stamped with the read that completed the line."""
    rest = b""
    for time, data in _body(recording):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            payload = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and payload != b"[DONE]":
                yield time, json.loads(payload)


def _body(recording: Recording) -> Iterator[Timed]:
    """The reply's body without HTTP framing."""
    raw = b"".join(data for _, data in recording.pieces)
    head, separator, _ = raw.partition(b"\r\n\r\n")
    if not separator:
        raise BenchError("the server closed the connection without a reply")
    status, *headers = head.decode("latin-1").split("\r\n")
    chunked = any("chunked" in h.lower() for h in headers if h.lower().startswith("transfer-enc"))
    start = len(head) + len(separator)
    pieces = _chunks(recording, raw, start) if chunked else _reads(recording, start)
    if status.split()[1] != "200":
        content = b"".join(data for _, data in pieces)
        raise BenchError(f"the server answered {status.split(maxsplit=1)[1]}: {_message(content)}")
    yield from pieces


def _reads(recording: Recording, start: int) -> Iterator[Timed]:
    """Reads as they came, less the header."""
    offset = 0
    for time, data in recording.pieces:
        yield time, data[max(0, start - offset) :]
        offset += len(data)


def _chunks(recording: Recording, raw: bytes, start: int) -> Iterator[Timed]:
    """HTTP chunks, each stamped with the read that brought its last byte."""
    ends = list(itertools.accumulate(len(data) for _, data in recording.pieces))
    while (line_end := raw.find(b"\r\n", start)) >= 0:
        size = int(raw[start:line_end].split(b";")[0], 16)
        first, start = line_end + 2, line_end + 2 + size + 2
        if size == 0 or first + size > len(raw):  # the end, or a chunk that we cut
            return
        yield recording.pieces[bisect_left(ends, first + size)][0], raw[first : first + size]


def _message(content: bytes) -> str:
    try:
        return _error_message(json.loads(content))
    except (ValueError, AttributeError):
        return content[:200].decode(errors="replace")


def _error_message(body: dict[str, Any]) -> str:
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)
