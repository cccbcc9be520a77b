"""Deltas of a request whose reader is behind: one delta, with everything in it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pippin.engine.engine_client import DeltaQueue, joined_deltas
from pippin.messages import TokenDelta
from pippin.types import TokenLogprobs

FIRST = TokenDelta(
    "a",
    [1],
    [TokenLogprobs(-1.0)],
    [TokenLogprobs(-9.0)],
    cached_tokens=7,
    host_tokens=3,
    disk_tokens=2,
    peer_tokens=1,
    queued_s=0.5,
)
SECOND = TokenDelta("a", [2, 3], [TokenLogprobs(-2.0), TokenLogprobs(-3.0)], accepted_drafts=1)
LAST = TokenDelta("a", [4], [TokenLogprobs(-4.0)], accepted_drafts=2, finish="length")


def read(deltas: Sequence[TokenDelta], num_reads: int) -> list[TokenDelta]:
    async def run() -> list[TokenDelta]:
        queue = DeltaQueue()
        for delta in deltas:
            queue.put(delta)
        return [await queue.get() for _ in range(num_reads)]

    return asyncio.run(run())


def test_what_has_arrived_is_one_delta_with_all_tokens_and_logprobs() -> None:
    (delta,) = read([FIRST, SECOND, LAST], 1)
    assert delta.tokens == [1, 2, 3, 4]
    assert [known.logprob for known in delta.logprobs or ()] == [-1.0, -2.0, -3.0, -4.0]
    assert (delta.cached_tokens, delta.host_tokens, delta.disk_tokens) == (7, 3, 2)
    assert delta.peer_tokens == 1
    assert (delta.queued_s, delta.prompt_logprobs) == (0.5, FIRST.prompt_logprobs)
    assert (delta.accepted_drafts, delta.finish) == (2, "length")


def test_a_reader_that_keeps_up_gets_each_as_it_was_sent() -> None:
    async def run() -> None:
        queue = DeltaQueue()
        for delta in (FIRST, SECOND, LAST):
            reading = asyncio.create_task(queue.get())
            await asyncio.sleep(0)
            queue.put(delta)
            assert await reading is delta

    asyncio.run(run())


def test_without_logprobs_there_are_none() -> None:
    plain = [TokenDelta("a", [1]), TokenDelta("a", [2]), TokenDelta("a", finish="stop")]
    delta = joined_deltas(plain)
    assert (delta.tokens, delta.logprobs, delta.finish) == ([1, 2], None, "stop")


@pytest.mark.parametrize("finish", ["error", "abort"])
def test_tokens_before_a_failure_are_read_before_it(finish: str) -> None:
    failure = TokenDelta("a", finish=finish, error="lost")  # type: ignore[arg-type]
    tokens, failed = read([FIRST, SECOND, failure], 2)
    assert tokens.tokens == [1, 2, 3]
    assert tokens.finish is None
    assert failed is failure


def test_a_read_that_was_cancelled_loses_nothing() -> None:
    async def run() -> TokenDelta:
        queue = DeltaQueue()
        reading = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.put(FIRST)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        queue.put(SECOND)
        return await queue.get()

    assert asyncio.run(run()).tokens == [1, 2, 3]
