"""Sends requests to a server, from clients or at a rate, and sums up the replies.

Knows a client and what a request is; draws no prompts and starts no server.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any

from pippin.bench.client.sse import TimedReply, parse
from pippin.bench.client.wire import LoadClient, Recording
from pippin.bench.errors import BenchError
from pippin.bench.prompts import Prompts
from pippin.bench.results.samples import Spread

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
    def prompt_per_second(self) -> float:
        return self.prompt_tokens / self.seconds

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

    def requests(self, prompts: Prompts) -> Iterator[LoadRequest]:
        """New prompts; all are made before the first is sent."""
        texts = [prompts.text(self.prompt_tokens) for _ in range(self.number)]
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
