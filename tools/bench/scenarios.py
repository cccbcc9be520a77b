"""Workloads against one server: what is sent when, and the numbers of the replies.

Every scenario draws new prompts, so it is cold unless it shares a prefix on purpose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from pippin.bench.client import LoadClient, TimedReply, parse
from pippin.bench.report import median, percentile, ratio
from pippin.bench.serve import warm_up
from pippin.config import Config
from prompts import CountTokens, Prompts
from servers import as_options, pippin_server
from shared import chat

PROMPT_TOKENS = 2000
SHORT_TOKENS = 24
DECODE_TOKENS = 96
RUNNING_STREAMS = 4
RUNNING_TOKENS = 6000  # more than a stream generates before its client disconnects
IDLE_SECONDS = 2.0
ARRIVALS = 2
BRANCHES = 12
CONVERSATIONS = 8
TURNS = 6
SYSTEM_TOKENS = 600
REPLY_TOKENS = 32
REPEATED_TOKENS = 1000
LONG_TOKENS = 4500
TINY_TOKENS = 20
HEAD_START_SECONDS = 0.05  # of a long prompt before the short one beside it

Numbers = dict[str, float]


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


async def interference(client: LoadClient, prompts: Prompts) -> Numbers:
    """Streams run alone for a while, then long prompts arrive, one after the other."""
    texts = [prompts.text(SHORT_TOKENS) for _ in range(RUNNING_STREAMS)]
    arriving = [prompts.text(PROMPT_TOKENS) for _ in range(ARRIVALS)]
    running = [await client.start_completion(text, RUNNING_TOKENS) for text in texts]
    try:
        await asyncio.gather(*(exchange.started for exchange in running))
        idle_since = perf_counter()
        await asyncio.sleep(IDLE_SECONDS)
        busy_since = perf_counter()
        arrivals = [parse(await client.complete(text, max_tokens=2)) for text in arriving]
        busy_until = arrivals[-1].first
    finally:
        for exchange in running:
            exchange.disconnect()
        await asyncio.gather(*(exchange.done for exchange in running))
        await asyncio.sleep(0.5)  # for the server to notice
    replies = [parse(exchange.recording) for exchange in running]
    idle = median([gap for r in replies for gap in r.gaps(idle_since, busy_since)])
    busy_gaps = [gap for r in replies for gap in _busy_gaps(r, busy_since, busy_until)]
    busy = percentile(busy_gaps, 0.99)
    return {
        "idle gap p50": idle * 1e3,
        "busy gap p99": busy * 1e3,
        "busy / idle": ratio(busy, idle),
        "longest stop": max(busy_gaps) * 1e3,
        "prompt TTFT": median([reply.ttft for reply in arrivals]),
    }


def _busy_gaps(reply: TimedReply, since: float, until: float) -> list[float]:
    """The gaps in a period; one that is still open at its end counts as long as it has lasted."""
    before = [time for time in reply.arrivals if time <= until]
    return [*reply.gaps(since, until), until - before[-1]]


async def fan_out(client: LoadClient, shared: str, prompts: Prompts) -> list[TimedReply]:
    """Branches of one prompt, all at once."""
    branches = [shared + prompts.text(SHORT_TOKENS) for _ in range(BRANCHES)]
    recordings = await asyncio.gather(*(client.complete(b, REPLY_TOKENS) for b in branches))
    return [parse(recording) for recording in recordings]


async def branches(client: LoadClient, prompts: Prompts) -> Numbers:
    replies = await fan_out(client, prompts.text(PROMPT_TOKENS), prompts)
    total = max(reply.last for reply in replies) - min(reply.sent for reply in replies)
    return {"TTFT p50": median([reply.ttft for reply in replies]), "total": total}


async def conversations(
    client: LoadClient, prompts: Prompts, *, at_once: int, reply_tokens: int
) -> Numbers:
    system = prompts.text(SYSTEM_TOKENS)
    questions = [[prompts.question() for _ in range(TURNS)] for _ in range(CONVERSATIONS)]
    room = asyncio.Semaphore(at_once)

    async def converse(asked: list[str]) -> list[TimedReply]:
        """One conversation; each turn carries the replies before it."""
        messages = [{"role": "system", "content": system}]
        replies = []
        async with room:
            for question in asked:
                messages.append({"role": "user", "content": question})
                replies.append(await chat(client, messages, reply_tokens))
                messages.append({"role": "assistant", "content": replies[-1].text})
        return replies

    began = perf_counter()
    chats = await asyncio.gather(*(converse(asked) for asked in questions))
    replies = [reply for chat in chats for reply in chat]
    total = max(reply.last for reply in replies) - began
    return {"TTFT p50": median([reply.ttft for reply in replies]), "total": total}


async def repeated_prompt(client: LoadClient, prompts: Prompts) -> Numbers:
    """A new prompt, then the same one again."""
    prompt = prompts.text(REPEATED_TOKENS)
    cold, again = [parse(await client.complete(prompt, max_tokens=2)).ttft for _ in range(2)]
    return {"TTFT again": again * 1e3, "of its cold TTFT": ratio(again, cold) * 100}


async def short_beside_long(client: LoadClient, prompts: Prompts) -> Numbers:
    """A long prompt alone; then another one, and a short one that arrives just after it."""
    alone = parse(await client.complete(prompts.text(LONG_TOKENS), max_tokens=2))
    long = await client.start_completion(prompts.text(LONG_TOKENS), max_tokens=2)
    await asyncio.sleep(HEAD_START_SECONDS)
    short = parse(await client.complete(prompts.text(TINY_TOKENS), max_tokens=2))
    held_up = parse(await long.done)
    return {
        "short TTFT": short.ttft * 1e3,
        "of the long one's": ratio(short.ttft, held_up.ttft) * 100,
        "long / alone": ratio(held_up.ttft, alone.ttft),
    }


@contextmanager
def warm_server(
    config: Config, count: CountTokens, *, killed: bool = False
) -> Iterator[LoadClient]:
    """A client of a `pippin serve` that is started for it; `killed`: it ends with kill -9."""
    name, *options = as_options(config)
    with pippin_server(name, options, killed=killed) as target:
        client = LoadClient(target)
        asyncio.run(warm_up(client, Prompts("warm-up", count).text))
        yield client
