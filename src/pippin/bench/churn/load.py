"""Requests of all lengths that come and go, as real use has them. Knows a client and prompts.

Benchmarks of settled batches repeat their shapes; here hardly any two requests are alike. Each is
drawn from a seed, so that equal seeds send equal requests, whatever the server makes of them.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from pippin.bench.client.sse import TimedReply, parse
from pippin.bench.client.wire import LoadClient, Recording
from pippin.bench.errors import BenchError
from pippin.bench.prompts import Prompts
from pippin.bench.results.samples import Spread

PROMPT_TOKENS = (5, 2500)  # of a request's own; every order of magnitude is as likely
SHARED_SHARE = 0.6  # of requests begin with what others begin with too,
SHARED_TOKENS = (10, 1000)  # so much of it
NUM_BEGINNINGS = 4
REPLY_TOKENS = (4, 300)
TEMPERATURES = (0.0, 0.0, 0.8, 1.0)
TOP_P = 0.95
LEAVING_SHARE = 0.1  # of clients hang up,
LEAVE_AFTER = 20  # after so many tokens
PAUSE_AFTER_ERROR = 0.2  # seconds: a server that refuses everybody is not to be flooded


@dataclass(frozen=True)
class ChurnLoad:
    """For `seconds` new requests come: from `num_clients`, each of which sends one after the
    other, or `rate` a second as a Poisson process. What runs then is waited for."""

    seconds: float
    num_clients: int = 12
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.num_clients} clients" if self.rate is None else f"{self.rate:g} a second"


@dataclass(frozen=True)
class ChurnRequest:
    prompt: str
    prompt_tokens: int  # as many words, unless the prompts are counted
    max_tokens: int
    sampling: dict[str, Any]
    leaves: bool


@dataclass(frozen=True)
class Sent:
    request: ChurnRequest
    result: Recording | BenchError


class ChurnRequests:
    """A client's requests, one after the other."""

    def __init__(self, prompts: Prompts, name: str) -> None:
        shared = prompts.beside("beginnings")  # the same for every client
        self._beginnings = [shared.text(SHARED_TOKENS[1]).split(" ") for _ in range(NUM_BEGINNINGS)]
        self._prompts = prompts.beside(name)
        self._random = random.Random(f"{prompts.seed}, {name}, lengths")

    def draw(self) -> ChurnRequest:
        rng = self._random
        own_tokens = round(math.exp(rng.uniform(*map(math.log, PROMPT_TOKENS))))
        shared_tokens = rng.randint(*SHARED_TOKENS) if rng.random() < SHARED_SHARE else 0
        beginning = " ".join(rng.choice(self._beginnings)[: shared_tokens + 1])  # [0] is empty
        temperature = rng.choice(TEMPERATURES)
        sampled = {"top_p": TOP_P, "seed": rng.randrange(1 << 30)} if temperature else {}
        return ChurnRequest(
            prompt=beginning + self._prompts.text(own_tokens),
            prompt_tokens=shared_tokens + own_tokens,
            max_tokens=rng.randint(*REPLY_TOKENS),
            sampling={"temperature": temperature, **sampled},
            leaves=rng.random() < LEAVING_SHARE,
        )


async def send_churn(client: LoadClient, load: ChurnLoad, prompts: Prompts) -> list[Sent]:
    """Everything that was sent and what came of it; parses nothing while it runs."""
    if load.rate is not None:
        arrivals = ChurnRequests(prompts, "arrivals")
        return await _at_rate(client, arrivals, load.rate, perf_counter() + load.seconds)
    sources = [ChurnRequests(prompts, f"client {index}") for index in range(load.num_clients)]
    until = perf_counter() + load.seconds
    parts = await asyncio.gather(*(_one_by_one(client, source, until) for source in sources))
    return [sent for part in parts for sent in part]


async def _one_by_one(client: LoadClient, requests: ChurnRequests, until: float) -> list[Sent]:
    sent = [await _send(client, requests.draw())]  # one at least, however little time there is
    while perf_counter() < until:
        sent.append(await _send(client, requests.draw()))
    return sent


async def _at_rate(
    client: LoadClient, requests: ChurnRequests, rate: float, until: float
) -> list[Sent]:
    clock = random.Random(f"arrivals {rate}")
    running = []
    while perf_counter() < until:
        running.append(asyncio.create_task(_send(client, requests.draw())))
        await asyncio.sleep(clock.expovariate(rate))
    return list(await asyncio.gather(*running))


async def _send(client: LoadClient, request: ChurnRequest) -> Sent:
    leave_after = LEAVE_AFTER if request.leaves else None
    result: Recording | BenchError
    try:
        exchange = await client.start_completion(
            request.prompt, request.max_tokens, leave_after=leave_after, **request.sampling
        )
        result = await exchange.done
    except BenchError as error:
        result = error
    if isinstance(result, BenchError) or result.refused:
        await asyncio.sleep(PAUSE_AFTER_ERROR)
    return Sent(request, result)


@dataclass(frozen=True)
class ChurnOutcome:
    """What clients saw. Times in seconds; `began` and `ended` on time.perf_counter()."""

    began: float
    ended: float
    num_requests: int
    generated_tokens: int
    prompt_tokens: int
    cached_tokens: int
    ttft: Spread
    gap: Spread
    errors: dict[str, int]  # how often, by message

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


def summarize_churn(sent: Sequence[Sent]) -> ChurnOutcome:
    replies: list[tuple[ChurnRequest, TimedReply]] = []
    errors: Counter[str] = Counter()
    for each in sent:
        try:
            replies.append((each.request, _reply(each.result)))
        except BenchError as error:
            errors[error.message] += 1
    if not replies:
        raise BenchError(f"none of {len(sent)} requests was answered: {_commonest(errors)}")
    return ChurnOutcome(
        began=min(reply.sent for _, reply in replies),
        ended=max(reply.last for _, reply in replies),
        num_requests=len(sent),
        generated_tokens=sum(reply.num_tokens for _, reply in replies),
        # Whoever left did not hear how many there were.
        prompt_tokens=sum(reply.prompt_tokens or asked.prompt_tokens for asked, reply in replies),
        cached_tokens=sum(reply.cached_tokens or 0 for _, reply in replies),
        ttft=Spread.of([reply.ttft for _, reply in replies]),
        gap=Spread.of([gap for _, reply in replies for gap in reply.gaps()]),
        errors=dict(errors),
    )


def _reply(result: Recording | BenchError) -> TimedReply:
    if isinstance(result, BenchError):
        raise result
    return parse(result)


def _commonest(errors: Counter[str]) -> str:
    return errors.most_common(1)[0][0] if errors else "nothing was sent"
