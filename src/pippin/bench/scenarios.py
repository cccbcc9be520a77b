"""The workloads, each against one server: what is sent when, and which numbers come out.

Knows a client and prompts; knows no processes. Every scenario draws fresh prompts, so it is cold
unless it shares a prefix on purpose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, ClassVar

from pippin.bench.prompts import Prompts
from pippin.bench.samples import median, percentile, ratio
from pippin.bench.sse import TimedReply, parse
from pippin.bench.wire import Exchange, LoadClient

PROMPT_TOKENS = 2000
SHORT_TOKENS = 24
DECODE_TOKENS = 96
RUNNING_STREAMS = 4
RUNNING_TOKENS = 6000  # more than a stream gets to say before it is hung up on
IDLE_SECONDS = 2.0
ARRIVALS = 2
BRANCHES = 12
CONVERSATIONS = 8
TURNS = 6
SYSTEM_TOKENS = 600
REPLY_TOKENS = 32

Numbers = dict[str, float]
Run = Callable[[LoadClient, Prompts], Coroutine[Any, Any, Numbers]]


@dataclass(frozen=True)
class Measure:
    """One number of a scenario."""

    name: str
    unit: str
    higher_is_better: bool = False
    times_better: float | None = None  # what we want to be at least
    at_most: float | None = None  # ... of our own number

    def verdict(self, ours: float, theirs: float) -> str:
        """What was wanted and whether it was reached; empty if nothing was."""
        if self.times_better is not None:
            reached = self.advantage(ours, theirs) >= self.times_better
            return f"at least {self.times_better:g}x: {'met' if reached else 'missed'}"
        if self.at_most is not None:
            return f"ours at most {self.at_most:g}: {'met' if ours <= self.at_most else 'missed'}"
        return ""

    def advantage(self, ours: float, theirs: float) -> float:
        """How many times better ours is."""
        return ratio(ours, theirs) if self.higher_is_better else ratio(theirs, ours)


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    measures: tuple[Measure, ...]
    run: Run


async def cold_prompt(client: LoadClient, prompts: Prompts) -> Numbers:
    prompt = prompts.text(PROMPT_TOKENS)
    reply = parse(await client.complete(prompt, max_tokens=1))
    num_tokens = reply.prompt_tokens or PROMPT_TOKENS
    return {"prefill": num_tokens / reply.ttft, "TTFT": reply.ttft}


async def streams(client: LoadClient, prompts: Prompts, num_streams: int) -> Numbers:
    """Tokens a second over all streams, from the first token that arrives to the last."""
    texts = [prompts.text(SHORT_TOKENS) for _ in range(num_streams)]
    recordings = await asyncio.gather(
        *(client.complete(text, max_tokens=DECODE_TOKENS) for text in texts)
    )
    replies = [parse(recording) for recording in recordings]
    seconds = max(reply.last for reply in replies) - min(reply.first for reply in replies)
    num_tokens = sum(reply.num_tokens - 1 for reply in replies)
    gaps = [gap for reply in replies for gap in reply.gaps()]
    return {"decode": ratio(num_tokens, seconds), "gap p99": percentile(gaps, 0.99) * 1e3}


@dataclass(frozen=True)
class Interference:
    """What running streams and arriving prompts do to each other. All in seconds."""

    measures: ClassVar = (
        Measure("busy gap p99", "ms"),
        Measure("idle gap p50", "ms"),
        Measure("busy / idle", "x", at_most=5.0),
        Measure("longest stop", "ms"),
        Measure("prompt TTFT", "s", times_better=1.0),
    )

    idle_gaps: list[float]
    busy_gaps: list[float]
    ttfts: list[float]

    def numbers(self) -> Numbers:
        idle, busy = median(self.idle_gaps), percentile(self.busy_gaps, 0.99)
        return {
            "idle gap p50": idle * 1e3,
            "busy gap p99": busy * 1e3,
            "busy / idle": ratio(busy, idle),
            "longest stop": max(self.busy_gaps) * 1e3,
            "prompt TTFT": median(self.ttfts),
        }


async def interfere(
    client: LoadClient,
    prompts: Prompts,
    *,
    num_streams: int = RUNNING_STREAMS,
    num_arrivals: int = ARRIVALS,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Interference:
    """Streams run alone for a while, then long prompts arrive, one after the other."""
    texts = [prompts.text(SHORT_TOKENS) for _ in range(num_streams)]
    arriving = [prompts.text(prompt_tokens) for _ in range(num_arrivals)]
    running = [await client.start_completion(text, RUNNING_TOKENS) for text in texts]
    try:
        await asyncio.gather(*(exchange.started for exchange in running))
        idle_since = perf_counter()
        await asyncio.sleep(IDLE_SECONDS)
        busy_since = perf_counter()
        arrivals = [parse(await client.complete(text, max_tokens=2)) for text in arriving]
        busy_until = arrivals[-1].first
    finally:
        await hang_up(running)
    replies = [parse(exchange.recording) for exchange in running]
    return Interference(
        idle_gaps=[gap for r in replies for gap in r.gaps(idle_since, busy_since)],
        busy_gaps=[gap for r in replies for gap in _busy_gaps(r, busy_since, busy_until)],
        ttfts=[reply.ttft for reply in arrivals],
    )


def _busy_gaps(reply: TimedReply, since: float, until: float) -> list[float]:
    """The gaps in a period; one that is still open at its end counts as long as it has lasted."""
    before = [time for time in reply.arrivals if time <= until]
    return [*reply.gaps(since, until), until - before[-1]]


async def hang_up(running: list[Exchange]) -> None:
    """End streams and give the server a moment to notice."""
    for exchange in running:
        exchange.hang_up()
    await asyncio.gather(*(exchange.done for exchange in running))
    await asyncio.sleep(0.5)


async def interference(client: LoadClient, prompts: Prompts) -> Numbers:
    return (await interfere(client, prompts)).numbers()


async def fan_out(client: LoadClient, shared: str, prompts: Prompts) -> list[TimedReply]:
    """Branches of one prompt, all at once."""
    branches = [shared + prompts.text(SHORT_TOKENS) for _ in range(BRANCHES)]
    recordings = await asyncio.gather(*(client.complete(b, REPLY_TOKENS) for b in branches))
    return [parse(recording) for recording in recordings]


async def branches(client: LoadClient, prompts: Prompts) -> Numbers:
    replies = await fan_out(client, prompts.text(PROMPT_TOKENS), prompts)
    total = max(reply.last for reply in replies) - min(reply.sent for reply in replies)
    return {"TTFT p50": median([reply.ttft for reply in replies]), "total": total}


async def converse(client: LoadClient, system: str, questions: list[str]) -> list[TimedReply]:
    """One conversation; each turn carries the replies that came before it."""
    messages = [{"role": "system", "content": system}]
    replies = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        reply = parse(await client.chat(messages, max_tokens=REPLY_TOKENS))
        messages.append({"role": "assistant", "content": reply.text})
        replies.append(reply)
    return replies


async def conversations(client: LoadClient, prompts: Prompts) -> Numbers:
    system = prompts.text(SYSTEM_TOKENS)
    questions = [[prompts.question() for _ in range(TURNS)] for _ in range(CONVERSATIONS)]
    began = perf_counter()
    chats = await asyncio.gather(*(converse(client, system, asked) for asked in questions))
    replies = [reply for chat in chats for reply in chat]
    total = max(reply.last for reply in replies) - began
    return {"TTFT p50": median([reply.ttft for reply in replies]), "total": total}


async def warm_up(client: LoadClient, prompts: Prompts) -> None:
    """Touch every path once, so that nobody pays for a first time inside a measurement."""
    texts = [prompts.text(600), *(prompts.text(SHORT_TOKENS) for _ in range(3))]
    for recording in await asyncio.gather(*(client.complete(t, max_tokens=8) for t in texts)):
        parse(recording)


def _decode(num_streams: int, times_better: float) -> Scenario:
    return Scenario(
        name=f"decode-{num_streams}",
        title=f"{num_streams} stream{'s' if num_streams > 1 else ''}",
        measures=(
            Measure("decode", "tok/s", higher_is_better=True, times_better=times_better),
            Measure("gap p99", "ms"),
        ),
        run=partial(streams, num_streams=num_streams),
    )


SCENARIOS = (
    Scenario(
        "prefill",
        f"cold prompt of {PROMPT_TOKENS:,} tokens",
        (
            Measure("prefill", "tok/s", higher_is_better=True, times_better=2.5),
            Measure("TTFT", "s"),
        ),
        cold_prompt,
    ),
    *(_decode(num_streams, better) for num_streams, better in ((1, 1.5), (4, 1.8), (16, 1.8))),
    Scenario(
        "interference",
        f"{RUNNING_STREAMS} streams while {PROMPT_TOKENS:,}-token prompts arrive",
        Interference.measures,
        interference,
    ),
    Scenario(
        "branches",
        f"{BRANCHES} branches of one {PROMPT_TOKENS:,}-token prompt at once",
        (Measure("TTFT p50", "s", times_better=8.0), Measure("total", "s")),
        branches,
    ),
    Scenario(
        "chats",
        f"{CONVERSATIONS} conversations x {TURNS} turns, a shared {SYSTEM_TOKENS}-token start",
        (
            Measure("total", "s", times_better=2.5),
            Measure("TTFT p50", "s", times_better=5.0),
        ),
        conversations,
    ),
)
