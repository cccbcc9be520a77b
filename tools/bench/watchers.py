"""What clients of /events cost a server: a load with and without them, in turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from pippin.bench.client import Load, LoadClient, RequestSizes, Sent, send_load, summarize_load
from pippin.bench.report import BenchError, Report, number, say
from pippin.bench.serve import ApiKey, Count, Numbers, find_target
from prompts import Prompts
from shared import Compared, Pairs, in_turn, pairs_table, run

LEAST_RATIO = 0.99  # tokens a second with watchers, over those without
FIRST_EVENT_SECONDS = 10.0


def watchers(
    *,
    url: str = "http://127.0.0.1:8000",
    model: str | None = None,
    api_key: ApiKey = None,
    number_of: Count = 10,
    concurrency: Numbers = None,
    requests: Count = 32,
    input: Count = 512,
    output: Count = 64,
    pairs: Count = 8,
) -> Report:
    """Compare loads of a running server with and without clients of /events.

    Parameters
    ----------
    url
        Address of the server.
    model
        Model name in the requests. Default: the first model that the server lists.
    api_key
        API key, sent as a bearer token.
    number_of
        Number of clients of /events.
    concurrency
        Numbers of requests in flight to measure. Default: 1,4,16.
    requests
        Number of requests of each run.
    input
        Length of each prompt in words.
    output
        Length of each reply, in tokens.
    pairs
        Number of pairs of runs, one with the clients and one without.
    """
    client = LoadClient(find_target(url, model, api_key))
    sizes = RequestSizes(requests, input, output)
    loads = [Load(clients) for clients in concurrency or (1, 4, 16)]
    rows = []
    data = []
    received: list[int] = []
    for load in loads:
        say(f"{load}, with {number_of} watchers and without: {pairs} pairs")
        rate = partial(_rate, client, load, sizes, received)
        ways = Pairs(*in_turn(pairs, partial(rate, number_of), partial(rate, 0)))
        rows.append(Compared(f"{load}, tok/s", ways, at_least=LEAST_RATIO))
        data.append({"load": str(load), **ways.as_dict()})
    each = sum(received) / len(received)
    title = f"{number_of} watchers, each of which received {number(each / 1e3)} KB a run"
    table = pairs_table(title, "watched", "alone", rows)
    return Report("watchers", [table], {"bytes_each": each, "loads": data})


def _rate(
    client: LoadClient,
    load: Load,
    sizes: RequestSizes,
    received: list[int],
    num_watchers: int,
    name: str,
) -> float:
    """Tokens a second of one run; the bytes that each watcher got are added to `received`."""
    requests = sizes.requests(Prompts(f"{load}, {name}, {num_watchers} watchers").text)

    async def run() -> list[Sent]:
        async with _watching(client, num_watchers) as counts:
            sent = await send_load(client, load, requests)
        received.extend(counts)
        return sent

    return summarize_load(asyncio.run(run())).generated_per_second


@asynccontextmanager
async def _watching(client: LoadClient, num_watchers: int) -> AsyncIterator[list[int]]:
    """So many watchers meanwhile; at the end, the bytes that each got."""
    exchanges = [await client.send("GET", "/events") for _ in range(num_watchers)]
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


if __name__ == "__main__":
    run(watchers)
