"""What watchers of /events cost: the same load with and without them, in turn. Knows only HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from pippin.bench.client.loads import Load, Replies, run_load, summarize_load
from pippin.bench.client.wire import LoadClient
from pippin.bench.errors import BenchError
from pippin.bench.pairs import Pairs, in_turn
from pippin.bench.prompts import Prompts
from pippin.bench.results.plot import Goal, Lines
from pippin.bench.results.report import Table, number, say
from pippin.bench.results.samples import median

LEAST_RATIO = 0.99
FIRST_EVENT_SECONDS = 10.0


@dataclass(frozen=True)
class WatchingCost:
    """Tokens a second with watchers over tokens a second without, under one load."""

    load: Load
    num_watchers: int
    rates: Pairs
    bytes_each: float  # that a watcher got in a run

    def as_dict(self) -> dict[str, object]:
        return {"load": str(self.load), "bytes_each": self.bytes_each, **self.rates.as_dict()}


def cost_of_watching(
    client: LoadClient, loads: Sequence[Load], *, num_watchers: int, num_pairs: int
) -> list[WatchingCost]:
    """Each pair is two runs of a load, whose prompts nobody has seen."""
    costs = []
    for load in loads:
        say(f"{load}, with {num_watchers} watchers and without: {num_pairs} pairs")
        received: list[int] = []

        rate = partial(_rate, client, load, received)
        tried, base = in_turn(num_pairs, partial(rate, num_watchers), partial(rate, 0))
        each = sum(received) / len(received)
        costs.append(WatchingCost(load, num_watchers, Pairs(tried, base), each))
    return costs


def watching_table(costs: Sequence[WatchingCost]) -> Table:
    header = ("load", "watched, tok/s", "alone, tok/s", "median of ratios", "quartiles", "target")
    rows: list[tuple[str, ...]] = []
    for cost in costs:
        low, high = cost.rates.quartiles
        verdict = "met" if cost.rates.ratio >= LEAST_RATIO else "missed"
        rows.append(
            (
                str(cost.load),
                number(median(cost.rates.tried)),
                number(median(cost.rates.base)),
                f"{cost.rates.ratio:.1%}",
                f"{low:.1%} to {high:.1%}",
                f"at least {LEAST_RATIO:.0%}: {verdict}",
            )
        )
    first = costs[0]
    kilobytes = number(first.bytes_each / 1e3)
    title = f"{first.num_watchers} watchers, each of whom got {kilobytes} KB in a run"
    return Table(title, header, rows)


def watching_chart(cost: WatchingCost) -> Lines:
    limit = (LEAST_RATIO - 1) * 100
    return Lines(
        f"Throughput with {cost.num_watchers} watchers, {cost.load}",
        "pair",
        "more tokens a second, %",
        cost.rates.extra_percent,
        target=Goal(limit, f"target: at least {limit:+g}%"),
    )


def _rate(
    client: LoadClient, load: Load, received: list[int], num_watchers: int, name: str
) -> float:
    """Tokens a second of one run; `received` grows by the bytes that each watcher got."""
    prompts = Prompts(f"{load}, {name}, {num_watchers} watchers")

    async def run() -> Replies:
        async with _watching(client, num_watchers) as counts:
            replies = await run_load(client, load, prompts)
        received.extend(counts)
        return replies

    return summarize_load(load, asyncio.run(run()), {}).tokens_per_second


@asynccontextmanager
async def _watching(client: LoadClient, num_watchers: int) -> AsyncIterator[list[int]]:
    """So many are told everything meanwhile; how many bytes each got, at the end."""
    exchanges = [await client.start_get("/events") for _ in range(num_watchers)]
    counts: list[int] = []
    try:
        for exchange in exchanges:
            try:
                await asyncio.wait_for(exchange.started, FIRST_EVENT_SECONDS)
            except TimeoutError as error:
                raise BenchError(f"{client.target.url}/events says nothing") from error
            if exchange.recording.refused:
                raise BenchError(f"{client.target.url}/events is refused: is it Pippin?")
        yield counts
    finally:
        for exchange in exchanges:
            exchange.hang_up()
            counts.append(sum(len(piece) for _, piece in exchange.recording.pieces))
        await asyncio.gather(*(exchange.done for exchange in exchanges))
