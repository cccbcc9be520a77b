"""Requests that arrive at a rate, or keep a fixed number in flight, and what came of them.

Knows no server but as what answers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pippin.bench.client.sse import TimedReply, parse
from pippin.bench.client.wire import LoadClient, Recording
from pippin.bench.errors import BenchError
from pippin.bench.prompts import Prompts
from pippin.bench.results.samples import Spread


@dataclass(frozen=True)
class Load:
    """How requests come: `level` in flight at a time, or `level` a second."""

    kind: Literal["concurrency", "rate"]
    level: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        return f"{self.level:g} at a time" if self.kind == "concurrency" else f"{self.level:g}/s"


@dataclass(frozen=True)
class LoadOutcome:
    """What clients saw under one load. Times in seconds."""

    load: Load
    seconds: float
    generated_tokens: int
    prompt_tokens: int
    ttft: Spread
    gap: Spread
    shares: dict[str, float]  # of Pippin's own metrics; empty for other servers
    errors: list[str]  # of requests that were refused or failed; the rest is about the others

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds


@dataclass(frozen=True)
class Replies:
    """What came of a load's requests."""

    whole: list[TimedReply]
    errors: list[str]


async def run_load(client: LoadClient, load: Load, prompts: Prompts) -> Replies:
    """Send every request when it is due; parse nothing until all are done."""
    texts = [prompts.text(load.prompt_tokens) for _ in range(load.num_requests)]
    if load.kind == "rate":
        recordings = await _at_rate(client, load, texts)
    else:
        recordings = await _at_concurrency(client, load, texts)
    return _parse_all(recordings)


def _parse_all(recordings: Sequence[Recording]) -> Replies:
    """A server under load may refuse some; only if it refuses all is there nothing to tell."""
    replies = Replies([], [])
    for recording in recordings:
        try:
            replies.whole.append(parse(recording))
        except BenchError as error:
            replies.errors.append(error.message)
    if not replies.whole:
        raise BenchError(replies.errors[0])
    return replies


async def _at_concurrency(client: LoadClient, load: Load, texts: list[str]) -> list[Recording]:
    room = asyncio.Semaphore(int(load.level))

    async def one(text: str) -> Recording:
        async with room:
            return await client.complete(text, load.output_tokens)

    return list(await asyncio.gather(*(one(text) for text in texts)))


async def _at_rate(client: LoadClient, load: Load, texts: list[str]) -> list[Recording]:
    clock = random.Random(f"arrivals {load.level}")
    sent: list[asyncio.Task[Recording]] = []
    for text in texts:
        sent.append(asyncio.create_task(client.complete(text, load.output_tokens)))
        await asyncio.sleep(clock.expovariate(load.level))
    return list(await asyncio.gather(*sent))


def summarize_load(load: Load, replies: Replies, shares: dict[str, float]) -> LoadOutcome:
    whole = replies.whole
    return LoadOutcome(
        load=load,
        seconds=max(reply.last for reply in whole) - min(reply.sent for reply in whole),
        generated_tokens=sum(reply.num_tokens for reply in whole),
        prompt_tokens=sum(reply.prompt_tokens or 0 for reply in whole),
        ttft=Spread.of([reply.ttft for reply in whole]),
        gap=Spread.of([gap for reply in whole for gap in reply.gaps()]),
        shares=shares,
        errors=replies.errors,
    )
