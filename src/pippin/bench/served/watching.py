"""What clients of /events cost: each load with and without them, in turn. Knows only HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from pippin.bench.client.load import Load, RequestSizes, Sent, send_load, summarize_load
from pippin.bench.client.wire import LoadClient
from pippin.bench.errors import BenchError
from pippin.bench.prompts import Prompts
from pippin.bench.results.pairs import Compared, Pairs, in_turn, pairs_table
from pippin.bench.results.report import Part, number, say

LEAST_RATIO = 0.99  # tokens a second with watchers, over those without
FIRST_EVENT_SECONDS = 10.0


def cost_of_watching(
    client: LoadClient,
    loads: Sequence[Load],
    sizes: RequestSizes,
    *,
    num_watchers: int,
    num_pairs: int,
) -> Part:
    """Each pair is two runs of a load, with new prompts."""
    rows = []
    data = []
    received: list[int] = []
    for load in loads:
        say(f"{load}, with {num_watchers} watchers and without: {num_pairs} pairs")
        rate = partial(_rate, client, load, sizes, received)
        pairs = Pairs(*in_turn(num_pairs, partial(rate, num_watchers), partial(rate, 0)))
        rows.append(Compared(f"{load}, tok/s", pairs, at_least=LEAST_RATIO))
        data.append({"load": str(load), **pairs.as_dict()})
    each = sum(received) / len(received)
    title = f"{num_watchers} watchers, each of which received {number(each / 1e3)} KB a run"
    return pairs_table(title, "watched", "alone", rows), {"bytes_each": each, "loads": data}


def _rate(
    client: LoadClient,
    load: Load,
    sizes: RequestSizes,
    received: list[int],
    num_watchers: int,
    name: str,
) -> float:
    """Tokens a second of one run; the bytes that each watcher got are added to `received`."""
    requests = sizes.requests(Prompts(f"{load}, {name}, {num_watchers} watchers"))

    async def run() -> list[Sent]:
        async with _watching(client, num_watchers) as counts:
            sent = await send_load(client, load, requests)
        received.extend(counts)
        return sent

    return summarize_load(asyncio.run(run())).generated_per_second


@asynccontextmanager
async def _watching(client: LoadClient, num_watchers: int) -> AsyncIterator[list[int]]:
    """So many watchers meanwhile; at the end, the bytes that each got."""
    exchanges = [await client.start_get("/events") for _ in range(num_watchers)]
    counts: list[int] = []
    try:
        for exchange in exchanges:
            try:
                await asyncio.wait_for(exchange.started, FIRST_EVENT_SECONDS)
            except TimeoutError as error:
                raise BenchError(
                    f"{client.target.url}/events sent no event in {FIRST_EVENT_SECONDS:g} s"
                ) from error
            if exchange.recording.refused:
                raise BenchError(f"{client.target.url}/events is refused: is it a Pippin server?")
        yield counts
    finally:
        for exchange in exchanges:
            exchange.disconnect()
            counts.append(sum(len(piece) for _, piece in exchange.recording.pieces))
        await asyncio.gather(*(exchange.done for exchange in exchanges))
