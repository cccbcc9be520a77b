"""What a streamed token costs the server's two processes, in CPU time.

The engine computes nothing: it is the toy, at a pace that the server can keep up with. So each
token is an event and a write of its own, which is the most that it costs; a client or a server that
is behind gets several tokens in one event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from pippin.bench.client import Exchange, LoadClient, Target
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
TOKENS, SERVER_S, ENGINE_S = (
    "pippin_generation_tokens_total",
    *(f"pippin_{process}_cpu_seconds_total" for process in ("server", "engine")),
)


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
    costs: list[dict[str, Any]] = []
    for number_of in streams or (1, 64, 256):
        step = max(FASTEST_STEP, number_of / rate)
        if (seconds + SETTLE_SECONDS) / step > MAX_TOKENS / 2:
            raise BenchError(f"replies end in {seconds:g} s: use a lower --seconds or --rate")
        options = ["--backend", "fake", "--fake-step", str(step), "--max-running", str(number_of)]
        with pippin_server(ModelConfig.model, options) as target:
            for dialect in dialects:
                say(f"{number_of} streams of {dialect}, a token each every {number(step * 1e3)} ms")
                cost = asyncio.run(_cost(target, dialect, number_of, seconds))
                costs.append({"dialect": dialect, "streams": number_of, **cost})
    rows = [(str(each["dialect"]), *map(number, [*each.values()][1:])) for each in costs]
    header = ("dialect", "streams", "tok/s", "server us", "engine us", "bytes", "tokens/read")
    notes = [
        "A server process whose token takes N us of CPU time sends at most 1,000,000 / N tokens a "
        "second. The engine's time includes the toy model's."
    ]
    table = Table("CPU time of a streamed token", header, rows)
    return Report("streams", [table], {"costs": costs}, notes)


async def _cost(target: Target, dialect: str, num_streams: int, seconds: float) -> dict[str, float]:
    client = LoadClient(target)
    path, fields = DIALECTS[dialect]
    body = {"model": target.model, **fields}
    exchanges = [await client.send("POST", path, body) for _ in range(num_streams)]
    try:
        async with asyncio.timeout(START_SECONDS):
            for exchange in exchanges:
                await exchange.first_read
        await asyncio.sleep(SETTLE_SECONDS)
        before = await _count(target, exchanges)
        await asyncio.sleep(seconds)
        after = await _count(target, exchanges)
    finally:
        for exchange in exchanges:
            exchange.disconnect()
        await asyncio.gather(*(exchange.done for exchange in exchanges))
    spent = {name: after[name] - before[name] for name in before}
    tokens = spent[TOKENS]
    return {
        "tokens_per_second": tokens / spent["seconds"],
        "server_us": spent[SERVER_S] / tokens * 1e6,  # of CPU time a token
        "engine_us": spent[ENGINE_S] / tokens * 1e6,
        "bytes_per_token": spent["bytes"] / tokens,
        "tokens_per_read": tokens / max(1, spent["reads"]),  # by the clients
    }


async def _count(target: Target, exchanges: Sequence[Exchange]) -> dict[str, float]:
    """What the server and its clients have counted so far."""
    for each in exchanges:
        if each.recording.refused:
            pieces = [piece for _, piece in each.recording.pieces] or [b"nothing"]
            refusal = pieces[0][-300:].decode(errors="replace")
            raise BenchError(f"a stream was refused: {refusal}")
        if each.done.done():
            raise BenchError("a stream ended before the measurement: use a lower --seconds")
    async with httpx.AsyncClient(timeout=START_SECONDS) as client:
        answer = (await client.get(f"{target.url}/metrics")).text
    pieces = [piece for each in exchanges for _, piece in each.recording.pieces]
    found = {"seconds": perf_counter(), "reads": len(pieces), "bytes": sum(map(len, pieces))}
    samples = (s for family in text_string_to_metric_families(answer) for s in family.samples)
    return found | {s.name: s.value for s in samples if s.name in (TOKENS, SERVER_S, ENGINE_S)}


if __name__ == "__main__":
    run(streams)
