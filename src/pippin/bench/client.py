"""Loads a server over HTTP, records what arrives and when, and sums it up afterwards.

The client shares the machine with the server that it measures, so what it does per token must be
next to nothing: one callback appends one tuple. `parse` reads the recording when all is done.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from pippin.bench.report import BenchError, Spread


@dataclass
class Recording:
    """One exchange. `pieces` are reads in order: (time.perf_counter() seconds, bytes)."""

    sent: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    cut: bool = False  # this client disconnected before the end

    @property
    def refused(self) -> bool:
        """Whether the server answered with an error, or not at all."""
        return not self.pieces or b" 200 " not in self.pieces[0][1][:16]


@dataclass(frozen=True)
class Target:
    """A server, and how to address it."""

    url: str
    model: str
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # fields added to every request


class Exchange(asyncio.Protocol):
    """One request on its own connection.

    `first_read`: something arrived; `started`: the first event; `done`: all of it.
    """

    def __init__(self, request: bytes, disconnect_after: int | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._request = request
        self._disconnect_after = disconnect_after  # reads, each about one event
        self._transport: asyncio.Transport | None = None
        self.recording = Recording(sent=perf_counter())
        self.first_read: asyncio.Future[None] = loop.create_future()
        self.started: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[Recording] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.recording.pieces.append((perf_counter(), data))
        if not self.first_read.done():
            self.first_read.set_result(None)
        if not self.started.done() and b"data:" in data:
            self.started.set_result(None)
        if len(self.recording.pieces) == self._disconnect_after:
            self.disconnect()

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self.first_read, self.started):
            if not future.done():  # an error reply, perhaps: the parser reports it
                future.set_result(None)
        if not self.done.done():
            self.done.set_result(self.recording)

    def disconnect(self) -> None:
        assert self._transport is not None
        self.recording.cut = True
        self._transport.abort()


class LoadClient:
    """Streams completions and chats from one server."""

    def __init__(self, target: Target) -> None:
        self.target = target
        parts = urlsplit(target.url)
        self._host = parts.hostname or "127.0.0.1"
        self._tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")

    async def complete(self, prompt: str, max_tokens: int) -> Recording:
        return await (await self.start_completion(prompt, max_tokens)).done

    async def start_completion(
        self, prompt: str, max_tokens: int, *, disconnect_after: int | None = None, **sampling: Any
    ) -> Exchange:
        """`disconnect_after`: so many reads; `sampling`: more fields."""
        fields = {"prompt": prompt, "max_tokens": max_tokens, **sampling}
        return await self.start_stream("/v1/completions", fields, disconnect_after)

    async def start_stream(
        self, path: str, fields: dict[str, Any], disconnect_after: int | None = None
    ) -> Exchange:
        body = {
            "model": self.target.model,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
            **self.target.extra,
        }
        return await self.send("POST", path, body, disconnect_after)

    async def send(
        self,
        method: str,
        path: str,
        fields: dict[str, Any] | None = None,
        disconnect_after: int | None = None,
    ) -> Exchange:
        """A request of any dialect, as it is."""
        body = b"" if fields is None else json.dumps(fields).encode()
        key = self.target.api_key
        head = [
            f"{method} {self._path}{path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",  # the end of the connection is the end of the reply
            *([f"Authorization: Bearer {key}"] if key else []),
        ]
        request = "\r\n".join([*head, "", ""]).encode() + body
        loop = asyncio.get_running_loop()
        try:
            _, exchange = await loop.create_connection(
                lambda: Exchange(request, disconnect_after),
                self._host,
                self._port,
                ssl=self._tls or None,
            )
        except OSError as error:
            raise BenchError(f"{self.target.url}: {error}") from error
        return exchange


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


DISCONNECT_AFTER = 20  # tokens, by a client that does not read its reply to the end
PAUSE_AFTER_ERROR = 0.2  # seconds: a server that refuses every request is not flooded


@dataclass(frozen=True)
class LoadRequest:
    prompt: str
    prompt_tokens: int  # as many words, unless the prompts are counted
    max_tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)
    disconnects: bool = False


@dataclass(frozen=True)
class Load:
    """`num_clients`, each of which sends one request after another, or `rate` requests a second
    as a Poisson process. New ones are sent for `seconds`; those in flight then finish."""

    num_clients: int = 12
    rate: float | None = None
    seconds: float | None = None  # None: until all requests were sent

    def __str__(self) -> str:
        return f"{self.num_clients} clients" if self.rate is None else f"{self.rate:g}/s"


@dataclass(frozen=True)
class Sent:
    request: LoadRequest
    result: Recording | BenchError


@dataclass(frozen=True)
class LoadOutcome:
    """What clients saw. Times in seconds; `began` and `ended` on time.perf_counter()."""

    began: float
    ended: float
    num_requests: int
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    ttft: Spread
    gap: Spread
    errors: dict[str, int]  # number of requests, by message; the rest is about the others

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def num_errors(self) -> int:
        return sum(self.errors.values())

    @property
    def generated_per_second(self) -> float:
        return self.generated_tokens / self.seconds

    @property
    def times_ms(self) -> dict[str, float]:
        times = {"TTFT": self.ttft, "gap": self.gap}
        return {
            f"{name} {p}": getattr(spread, p) * 1e3
            for name, spread in times.items()
            for p in ("p50", "p99")
        }


@dataclass(frozen=True)
class RequestSizes:
    """So many requests, all of one size."""

    number: int
    prompt_tokens: int
    output_tokens: int

    def requests(self, text: Callable[[int], str]) -> Iterator[LoadRequest]:
        """Each with a new text of that length; all are made before the first is sent."""
        texts = [text(self.prompt_tokens) for _ in range(self.number)]
        return (LoadRequest(text, self.prompt_tokens, self.output_tokens) for text in texts)


async def send_load(client: LoadClient, load: Load, requests: Iterator[LoadRequest]) -> list[Sent]:
    """Everything that was sent and its result; parses nothing while it runs."""
    until = inf if load.seconds is None else perf_counter() + load.seconds
    if load.rate is not None:
        clock = random.Random(f"arrivals {load.rate}")
        running = []
        for request in requests:
            running.append(asyncio.create_task(_send(client, request)))
            await asyncio.sleep(clock.expovariate(load.rate))
            if perf_counter() >= until:
                break
        return list(await asyncio.gather(*running))
    sent: list[Sent] = []

    async def one_by_one() -> None:
        for request in requests:  # that all clients share
            sent.append(await _send(client, request))
            if perf_counter() >= until:
                break

    await asyncio.gather(*(one_by_one() for _ in range(load.num_clients)))
    return sent


async def _send(client: LoadClient, request: LoadRequest) -> Sent:
    disconnect_after = DISCONNECT_AFTER if request.disconnects else None
    result: Recording | BenchError
    try:
        exchange = await client.start_completion(
            request.prompt,
            request.max_tokens,
            disconnect_after=disconnect_after,
            **request.sampling,
        )
        result = await exchange.done
    except BenchError as error:
        result = error
    if isinstance(result, BenchError) or result.refused:
        await asyncio.sleep(PAUSE_AFTER_ERROR)
    return Sent(request, result)


def summarize_load(sent: Sequence[Sent]) -> LoadOutcome:
    replies: list[tuple[LoadRequest, TimedReply]] = []
    errors: Counter[str] = Counter()
    for each in sent:
        try:
            if isinstance(each.result, BenchError):
                raise each.result
            replies.append((each.request, parse(each.result)))
        except BenchError as error:
            errors[error.message] += 1
    if not replies:
        reason = errors.most_common(1)[0][0] if errors else "nothing was sent"
        raise BenchError(f"none of {len(sent)} requests was answered: {reason}")
    return LoadOutcome(
        began=min(reply.sent for _, reply in replies),
        ended=max(reply.last for _, reply in replies),
        num_requests=len(sent),
        generated_tokens=sum(reply.num_tokens for _, reply in replies),
        # A client that disconnects gets no usage.
        prompt_tokens=sum(reply.prompt_tokens or asked.prompt_tokens for asked, reply in replies),
        cached_tokens=sum(reply.cached_tokens or 0 for _, reply in replies),
        ttft=Spread.of([reply.ttft for _, reply in replies]),
        gap=Spread.of([gap for _, reply in replies for gap in reply.gaps()]),
        errors=dict(errors),
    )
