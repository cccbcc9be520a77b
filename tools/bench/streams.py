"""What a streamed token costs the server's two processes, in CPU time.

The engine computes nothing: it is the toy, at a pace that the server can keep up with. So each
token is an event and a write of its own, which is the most that it costs; a client or a server that
is behind gets several tokens in one event.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from pippin.bench.client import (
    Exchange,
    LoadClient,
    Target,
)
from pippin.bench.report import BenchError, Report, Table, number, say
from pippin.bench.serve import Numbers
from pippin.config import ModelConfig
from servers import pippin_server
from shared import Names, Positive, run

START_SECONDS = 60.0
SETTLE_SECONDS = 0.5  # from the last stream's start to the first measurement
FASTEST_STEP = 0.005  # seconds
MAX_TOKENS = 8000  # of a reply: the toy's context less the prompt
_REPLY = {"stream": True, "ignore_eos": True, "max_tokens": MAX_TOKENS}
_MESSAGES = [{"role": "user", "content": "Hi."}]
_CHAT = {**_REPLY, "messages": _MESSAGES}
_OLLAMA = {"messages": _MESSAGES, "options": {"ignore_eos": True, "num_predict": MAX_TOKENS}}
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", _CHAT),
    "logprobs": ("/v1/chat/completions", {**_CHAT, "logprobs": True}),
    "completions": ("/v1/completions", {**_REPLY, "prompt": "Hi."}),
    "responses": ("/v1/responses", {"stream": True, "ignore_eos": True, "input": "Hi."}),
    "messages": ("/v1/messages", _CHAT),
    "ollama": ("/api/chat", _OLLAMA),
}


@dataclass(frozen=True)
class Counted:
    """What a server has counted at one time."""

    at: float  # time.perf_counter() seconds
    tokens: float
    server_s: float  # of CPU time
    engine_s: float


@dataclass(frozen=True)
class TokenCost:
    dialect: str
    num_streams: int
    tokens_per_second: float
    server_us: float  # of CPU time a token
    engine_us: float
    bytes_per_token: float
    tokens_per_read: float  # by the clients


def streams(
    *,
    only: Names = None,
    streams: Numbers = None,
    rate: Positive = 2500.0,
    seconds: Positive = 4.0,
) -> Report:
    """Measure the CPU time of a streamed token in the server process and in the engine process.

    Starts servers with the fake backend, which computes nothing, and needs no model.

    Parameters
    ----------
    only
        Dialects to measure: chat, logprobs (chat completions with logprobs), completions,
        responses, messages, ollama. Default: all.
    streams
        Numbers of streams to measure. Default: 1,64,256.
    rate
        Tokens per second of all streams together, at most 200 per stream. A rate that the server
        process can keep up with measures the highest cost: one that is behind sends several tokens
        at once.
    seconds
        Seconds of each measurement.
    """
    dialects = only or list(DIALECTS)
    for dialect in dialects:
        if dialect not in DIALECTS:
            raise BenchError(f"{dialect!r} is no dialect: use {', '.join(DIALECTS)}")
    costs: list[TokenCost] = []
    for number_of in streams or (1, 64, 256):
        step = max(FASTEST_STEP, number_of / rate)
        if (seconds + SETTLE_SECONDS) / step > MAX_TOKENS / 2:
            raise BenchError(f"replies end in {seconds:g} s: use a lower --seconds or --rate")
        options = ["--backend", "fake", "--fake-step", str(step), "--max-running", str(number_of)]
        with pippin_server(ModelConfig.model, options) as target:
            for dialect in dialects:
                say(f"{number_of} streams of {dialect}, a token each every {number(step * 1e3)} ms")
                costs.append(asyncio.run(_cost(target, dialect, number_of, seconds)))
    title = "CPU time of a streamed token"
    header = ("dialect", "streams", "tok/s", "server us", "engine us", "bytes", "tokens/read")
    rows = [(each.dialect, *map(number, dataclasses.astuple(each)[1:])) for each in costs]
    notes = [
        "A server process whose token takes N us of CPU time sends at most 1,000,000 / N tokens a "
        "second. The engine's time includes the toy model's."
    ]
    data = {"costs": [dataclasses.asdict(each) for each in costs]}
    return Report("streams", [Table(title, header, rows)], data, notes)


async def _cost(target: Target, dialect: str, num_streams: int, seconds: float) -> TokenCost:
    client = LoadClient(target)
    path, fields = DIALECTS[dialect]
    body = {"model": target.model, **fields}
    exchanges = [await client.send("POST", path, body) for _ in range(num_streams)]
    try:
        async with asyncio.timeout(START_SECONDS):
            for exchange in exchanges:
                await exchange.first_read
        _check(exchanges)
        await asyncio.sleep(SETTLE_SECONDS)
        before, before_reads = await _count(target), _reads(exchanges)
        await asyncio.sleep(seconds)
        after, after_reads = await _count(target), _reads(exchanges)
        _check(exchanges)
    finally:
        for exchange in exchanges:
            exchange.disconnect()
        await asyncio.gather(*(exchange.done for exchange in exchanges))
    tokens = after.tokens - before.tokens
    num_reads, nbytes = (b - a for a, b in zip(before_reads, after_reads, strict=True))
    return TokenCost(
        dialect,
        num_streams,
        tokens / (after.at - before.at),
        (after.server_s - before.server_s) / tokens * 1e6,
        (after.engine_s - before.engine_s) / tokens * 1e6,
        nbytes / tokens,
        tokens / max(1, num_reads),
    )


async def _count(target: Target) -> Counted:
    async with httpx.AsyncClient(timeout=START_SECONDS) as client:
        answer = await client.get(f"{target.url}/metrics")
    at = perf_counter()
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if not sample.labels
    }
    return Counted(
        at,
        values["pippin_generation_tokens_total"],
        values["pippin_server_cpu_seconds_total"],
        values["pippin_engine_cpu_seconds_total"],
    )


def _reads(exchanges: Sequence[Exchange]) -> tuple[int, int]:
    """Their number so far, and the number of bytes."""
    pieces = [piece for each in exchanges for _, piece in each.recording.pieces]
    return len(pieces), sum(map(len, pieces))


def _check(exchanges: Sequence[Exchange]) -> None:
    for exchange in exchanges:
        pieces = exchange.recording.pieces
        if exchange.recording.refused:
            answer = pieces[0][1] if pieces else b"nothing"
            raise BenchError(f"a stream was refused: {answer[-300:].decode(errors='replace')}")
        if exchange.done.done():
            raise BenchError("a stream ended before the measurement: use a lower --seconds")


if __name__ == "__main__":
    run(streams)
