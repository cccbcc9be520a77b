"""`pippin bench serve`: latency and throughput of any OpenAI endpoint under load. Knows only HTTP.

Requests arrive at a rate (as a Poisson process) or keep a fixed number in flight. If the server is
Pippin, its own account of the overlap is printed beside what clients saw.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import httpx

from pippin.bench.plot import Bar, Bars, Chart, Lines
from pippin.bench.prompts import Prompts
from pippin.bench.report import Report, Table, busy_note, number, say
from pippin.bench.samples import Spread
from pippin.bench.scenarios import Interference, Numbers, interfere, warm_up
from pippin.bench.servers import first_model
from pippin.bench.sse import TimedReply, parse
from pippin.bench.suite import INTERFERENCE
from pippin.bench.wire import BenchError, LoadClient, Recording, Target

SHARES = ("device_idle_share", "host_hidden_share")


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


def find_target(url: str, model: str | None, api_key: str | None) -> tuple[Target, bool]:
    """The server at `url`, and whether it is Pippin."""
    url = url.rstrip("/").removesuffix("/v1")
    is_pippin = bool(read_shares(url, api_key))
    name = model or first_model(url, api_key)
    extra = {"ignore_eos": True} if is_pippin else {}
    return Target(url, name, api_key, extra), is_pippin


def read_shares(url: str, api_key: str | None) -> dict[str, float]:
    """Device idle share and host time hidden over the last steps; empty if it is not Pippin."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url}/status", headers=headers, timeout=10)
        metrics = answer.json()["metrics"]
        return {name: float(metrics[name]) for name in SHARES}
    except (httpx.TransportError, ValueError, LookupError, TypeError):
        return {}


def measure_server(
    url: str,
    loads: Sequence[Load],
    *,
    model: str | None = None,
    api_key: str | None = None,
    num_streams: int = 0,
    long_prompt_tokens: int = 2000,
) -> Report:
    """Every load in turn; with `num_streams`, also streams while long prompts arrive."""
    notes = busy_note()
    target, is_pippin = find_target(url, model, api_key)
    client = LoadClient(target)
    asyncio.run(warm_up(client, Prompts("warm-up")))
    outcomes = []
    for load in loads:
        say(f"{load.num_requests} requests, {load}")
        prompts = Prompts(f"serve {load}")
        replies = asyncio.run(run_load(client, load, prompts))
        shares = read_shares(target.url, api_key) if is_pippin else {}
        outcomes.append(summarize_load(load, replies, shares))
    met = None
    if num_streams:
        say(f"{num_streams} streams while prompts of {long_prompt_tokens:,} tokens arrive")
        met = asyncio.run(
            interfere(
                client,
                Prompts("serve interference"),
                num_streams=num_streams,
                prompt_tokens=long_prompt_tokens,
            )
        )
    notes += [
        f"{o.load}: {len(o.errors)} of {o.load.num_requests} requests failed, "
        f"the first with: {o.errors[0]}"
        for o in outcomes
        if o.errors
    ]
    return summarize(target, outcomes, met, notes)


def summarize(
    target: Target, outcomes: list[LoadOutcome], met: Interference | None, notes: list[str]
) -> Report:
    tables = [_load_table(outcomes)] if outcomes else []
    charts = _charts(outcomes)
    data: dict[str, Any] = {"url": target.url, "model": target.model}
    data["loads"] = [
        {**asdict(outcome), "tokens_per_second": outcome.tokens_per_second} for outcome in outcomes
    ]
    if met is not None:
        numbers = met.numbers()
        rows: list[tuple[str, ...]] = [
            (f"{m.name}, {m.unit}", number(numbers[m.name])) for m in INTERFERENCE
        ]
        tables.append(Table("Streams while long prompts arrive", ("measure", "value"), rows))
        charts.append(_interference_chart(numbers))
        data["interference"] = numbers
    return Report("serve", tables, charts, data, notes)


def _load_table(outcomes: list[LoadOutcome]) -> Table:
    with_shares = any(outcome.shares for outcome in outcomes)
    header = ("load", "requests", "tok/s", "TTFT p50, ms", "p99", "gap p50, ms", "p99")
    rows: list[tuple[str, ...]] = []
    for o in outcomes:
        times = (o.ttft.p50, o.ttft.p99, o.gap.p50, o.gap.p99)
        served = f"{o.load.num_requests - len(o.errors)} of " if o.errors else ""
        requests = f"{served}{o.load.num_requests}"
        cells = (str(o.load), requests, number(o.tokens_per_second))
        shares = tuple(f"{o.shares[name]:.1%}" for name in SHARES) if o.shares else ()
        rows.append((*cells, *(number(seconds * 1e3) for seconds in times), *shares))
    sizes = outcomes[0].load
    title = f"{sizes.prompt_tokens:,} tokens in, {sizes.output_tokens:,} out"
    return Table(title, (*header, "device idle", "host hidden") if with_shares else header, rows)


def _charts(outcomes: list[LoadOutcome]) -> list[Chart]:
    charts: list[Chart] = []
    for kind, label in (("concurrency", "requests at a time"), ("rate", "requests a second")):
        chosen = [o for o in outcomes if o.load.kind == kind]
        if not chosen:
            continue
        throughput = {"throughput": [(o.load.level, o.tokens_per_second) for o in chosen]}
        waits = {
            "TTFT p50": [(o.load.level, o.ttft.p50 * 1e3) for o in chosen],
            "TTFT p99": [(o.load.level, o.ttft.p99 * 1e3) for o in chosen],
            "gap p99": [(o.load.level, o.gap.p99 * 1e3) for o in chosen],
        }
        charts.append(Lines("Throughput", label, "tok/s", throughput, log_x=True))
        charts.append(Lines("Waiting", label, "ms", waits, log_x=True, log_y=True))
    return charts


def _interference_chart(numbers: Numbers) -> Bars:
    gaps = ("idle gap p50", "busy gap p99", "longest stop")
    rows = [Bar(name, (numbers[name],)) for name in gaps]
    title = "Gaps between tokens of running streams while long prompts arrive"
    return Bars(title, "ms", ("gap",), rows, unit=" ms", log_x=True)
