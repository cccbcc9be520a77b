"""Watchers: one message for all, nobody waits for a slow one, the engine knows if there are any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from one_engine import OneEngine
from pippin.engine.engine_client import MAX_UNREAD, MAX_WATCHERS, Watchers, WatchEvent
from pippin.errors import Overloaded, PippinError
from pippin.messages import FeedMessage, ToEngine, Unwatch, Watch
from processes import PATIENCE_SECONDS

Stream = AsyncGenerator[WatchEvent, None]
Scenario = Callable[[Watchers, list[ToEngine]], Coroutine[Any, Any, None]]
SNAPSHOT = FeedMessage("snapshot", b"{}")


def with_watchers(scenario: Scenario) -> Callable[[], None]:
    async def work() -> None:
        sent: list[ToEngine] = []
        await scenario(Watchers(sent.append), sent)

    return lambda: asyncio.run(asyncio.wait_for(work(), PATIENCE_SECONDS))


def frame(number: int) -> FeedMessage:
    return FeedMessage("frame", str(number).encode())


async def begin(stream: Stream) -> asyncio.Task[WatchEvent]:
    """Read until there is nothing; the first event that comes then."""
    task = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    return task


async def read(stream: Stream, count: int) -> list[str]:
    return [(await anext(stream)).json.decode() for _ in range(count)]


@with_watchers
async def test_the_engine_is_told_of_the_first_and_of_the_last(
    watchers: Watchers, sent: list[ToEngine]
) -> None:
    one, two = watchers.watch(), watchers.watch()
    tasks = [await begin(one), await begin(two)]
    assert sent == [Watch(), Watch()]  # the second needs a snapshot, too
    watchers.deliver(SNAPSHOT)
    await asyncio.gather(*tasks)
    await one.aclose()
    assert len(sent) == 2
    await two.aclose()
    assert sent == [Watch(), Watch(), Unwatch()]


@with_watchers
async def test_everybody_is_told_the_same_and_begins_with_a_snapshot(
    watchers: Watchers, sent: list[ToEngine]
) -> None:
    async with aclosing(watchers.watch()) as one, aclosing(watchers.watch()) as two:
        first = await begin(one)
        watchers.deliver(frame(1))  # before it has a snapshot: it means nothing to it
        watchers.deliver(SNAPSHOT)
        watchers.deliver(frame(2))
        second = await begin(two)
        watchers.deliver(frame(3))
        watchers.deliver(SNAPSHOT)  # for the second alone
        watchers.deliver(frame(4))
        assert [(await first).name, *await read(one, 3)] == ["snapshot", "2", "3", "4"]
        assert [(await second).name, *await read(two, 1)] == ["snapshot", "4"]


@with_watchers
async def test_a_slow_one_skips_and_is_told_anew_while_others_miss_nothing(
    watchers: Watchers, sent: list[ToEngine]
) -> None:
    async with aclosing(watchers.watch()) as slow, aclosing(watchers.watch()) as quick:
        tasks = [await begin(slow), await begin(quick)]
        watchers.deliver(SNAPSHOT)
        await asyncio.gather(*tasks)
        for number in range(3 * MAX_UNREAD):
            watchers.deliver(frame(number))
            assert await read(quick, 1) == [str(number)]
        assert await read(slow, MAX_UNREAD) == [str(n) for n in range(MAX_UNREAD)]
        num_sent = len(sent)
        task = await begin(slow)
        assert sent[num_sent:] == [Watch()]
        watchers.deliver(frame(100))
        watchers.deliver(FeedMessage("snapshot", b"anew"))
        watchers.deliver(frame(101))
        assert [(await task).json, *await read(slow, 1)] == [b"anew", "101"]
        assert await read(quick, 2) == ["100", "101"]


@with_watchers
async def test_too_many_are_refused(watchers: Watchers, sent: list[ToEngine]) -> None:
    streams = [watchers.watch() for _ in range(MAX_WATCHERS)]
    tasks = [await begin(stream) for stream in streams]
    with pytest.raises(Overloaded, match=str(MAX_WATCHERS)):
        await anext(watchers.watch())
    watchers.deliver(SNAPSHOT)
    await asyncio.gather(*tasks)
    for stream in streams:
        await stream.aclose()
    assert sent[-1] == Unwatch()
    task = await begin(again := watchers.watch())
    watchers.deliver(SNAPSHOT)
    await task
    await again.aclose()


@with_watchers
async def test_streams_end_with_an_error_when_nothing_can_be_told_any_more(
    watchers: Watchers, sent: list[ToEngine]
) -> None:
    async with aclosing(watchers.watch()) as one:
        task = await begin(one)
        watchers.deliver(SNAPSHOT)
        await task
        watchers.deliver(frame(1))
        watchers.deliver(FeedMessage("lost", b""))
        assert await read(one, 1) == ["1"]
        with pytest.raises(PippinError, match="requests are served as before"):
            await anext(one)
    assert sent == [Watch(), Unwatch()]


def test_watchers_survive_an_engine() -> None:
    class Sent(list[ToEngine]):
        alive = True
        send = list.append

    async def work() -> None:
        client, first, second = OneEngine(), Sent(), Sent()
        client.engine_ready(first)
        async with aclosing(client.watch()) as events:
            task = await begin(events)
            client.deliver(SNAPSHOT)
            assert (await task).name == "snapshot"
            client.engine_lost("it died")
            lost = await anext(events)
            assert lost.name == "engine"
            assert b"it died; another is being started" in lost.json
            task = await begin(events)
            assert Watch() not in second
            client.engine_ready(second)
            assert Watch() in second
            client.deliver(frame(7))  # nobody has a snapshot of this engine
            client.deliver(SNAPSHOT)
            assert (await task).name == "snapshot"
            task = await begin(events)
            client.close()
            with pytest.raises(StopAsyncIteration):
                await task

    asyncio.run(asyncio.wait_for(work(), PATIENCE_SECONDS))
