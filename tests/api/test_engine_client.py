"""The server's end of the channel, against a socket that a test holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from pippin.api import engine_client, pulse
from pippin.api.engine_client import ZmqEngine
from pippin.errors import EngineDead, LoadError, PippinError
from pippin.messages import (
    Abort,
    Alive,
    Answer,
    Failed,
    Finish,
    FlushCache,
    FromEngine,
    GetStatus,
    Loading,
    Ready,
    Shutdown,
    Submit,
    ToEngine,
    TokenBatch,
    TokenDelta,
)
from pippin.types import SamplingParams


class OtherEnd:
    """What the engine process holds: both sockets, bound."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._push = self._context.socket(zmq.PUSH)
        self.addresses = tuple(
            f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
            for socket in (self._pull, self._push)
        )

    async def receive(self) -> ToEngine:
        return msgspec.msgpack.decode(await self._pull.recv(), type=ToEngine)

    async def send(self, message: FromEngine) -> None:
        await self._push.send(msgspec.msgpack.encode(message))

    async def send_junk(self) -> None:
        await self._push.send(b"\xc1")

    def close(self) -> None:
        self._context.destroy(linger=0)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[ZmqEngine, OtherEnd]]:
    other = OtherEnd()
    engine = ZmqEngine(*other.addresses)
    await engine.start()
    try:
        yield engine, other
    finally:
        await engine.close()
        other.close()


def submit(id: str = "a") -> Submit:
    return Submit(id, [1, 2], SamplingParams(logit_bias={5: 1.0}, stop=("x",)), [2], [1])


async def collect(engine: ZmqEngine, id: str) -> list[TokenDelta]:
    return [delta async for delta in engine.generate(submit(id))]


def test_deltas_reach_the_request_they_belong_to() -> None:
    async def scenario() -> None:
        async with connected() as (engine, other):
            tasks = [asyncio.create_task(collect(engine, id)) for id in "ab"]
            assert [await other.receive() for _ in "ab"] == [submit("a"), submit("b")]
            await other.send(TokenBatch([TokenDelta("a", [1]), TokenDelta("b", [2])]))
            await other.send(TokenBatch([TokenDelta("x", [9]), TokenDelta("b", finish="stop")]))
            await other.send(TokenBatch([TokenDelta("a", [3], finish="length")]))
            a, b = await asyncio.gather(*tasks)
            assert a == [TokenDelta("a", [1]), TokenDelta("a", [3], finish="length")]
            assert b == [TokenDelta("b", [2]), TokenDelta("b", finish="stop")]
            await engine_sent_nothing_but_shutdown(engine, other)

    asyncio.run(scenario())


async def engine_sent_nothing_but_shutdown(engine: ZmqEngine, other: OtherEnd) -> None:
    engine.abort("a")  # over: nothing to say
    engine._send(Shutdown())
    assert await other.receive() == Shutdown()


def test_closing_a_request_early_aborts_it() -> None:
    async def scenario() -> None:
        async with connected() as (engine, other):
            async with aclosing(engine.generate(submit())) as deltas:
                task = asyncio.create_task(anext(deltas))
                assert await other.receive() == submit()
                await other.send(TokenBatch([TokenDelta("a", [1])]))
                await task
            assert await other.receive() == Abort("a")

    asyncio.run(scenario())


def test_a_request_finished_here_is_not_aborted() -> None:
    async def scenario() -> None:
        async with connected() as (engine, other):
            async with aclosing(engine.generate(submit())) as deltas:
                task = asyncio.create_task(anext(deltas))
                await other.receive()
                await other.send(TokenBatch([TokenDelta("a", [1])]))
                await task
                engine.finish("a")
            assert await other.receive() == Finish("a")
            await engine_sent_nothing_but_shutdown(engine, other)

    asyncio.run(scenario())


def test_status_and_flush_are_answered() -> None:
    async def scenario() -> None:
        async with connected() as (engine, other):
            tasks = [
                asyncio.create_task(engine.status()),
                asyncio.create_task(engine.flush_cache()),
            ]
            status, flush = await other.receive(), await other.receive()
            assert isinstance(status, GetStatus)
            assert isinstance(flush, FlushCache)
            await other.send(Answer(flush.id, {"freed": 1}))
            await other.send(Answer(status.id, {"running": 2}))
            assert await asyncio.gather(*tasks) == [{"running": 2}, {"freed": 1}]

    asyncio.run(scenario())


def test_a_question_that_could_not_be_answered_is_an_error() -> None:
    async def scenario() -> None:
        async with connected() as (engine, other):
            asking = asyncio.create_task(engine.status())
            question = await other.receive()
            assert isinstance(question, GetStatus)
            await other.send(Answer(question.id, {}, error="the tree is broken"))
            with pytest.raises(PippinError, match="the tree is broken"):
                await asking
            assert engine.healthy

    asyncio.run(scenario())


def test_when_the_engine_dies_everything_ends_with_its_reason() -> None:
    async def scenario() -> None:
        async with connected() as (engine, other):
            running = asyncio.create_task(collect(engine, "a"))
            asking = asyncio.create_task(engine.status())
            await other.receive()
            engine.engine_died("killed by signal 9")
            assert not engine.healthy
            assert engine.reason == "killed by signal 9"
            for deltas in (await running, await collect(engine, "b")):
                [delta] = deltas
                assert (delta.finish, delta.error) == ("error", "killed by signal 9")
                assert (delta.error_code, delta.error_status) == ("engine_dead", 503)
            for call in (asking, engine.flush_cache()):
                with pytest.raises(EngineDead, match="signal 9"):
                    await call

    asyncio.run(scenario())


def test_an_engine_that_hangs_fails_its_requests_and_is_healthy_once_it_is_heard_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_client, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(pulse, "IDLE_LIMIT_SECONDS", 0.05)

    async def scenario() -> None:
        async with connected() as (engine, other):
            running = asyncio.create_task(collect(engine, "a"))
            asking = asyncio.create_task(engine.status())
            assert [type(await other.receive()) for _ in range(2)] == [Submit, GetStatus]
            await other.send(Alive(stepping=False))
            [delta] = await running
            assert (delta.finish, delta.error_code, delta.error_status) == (
                "error",
                "engine_dead",
                503,
            )
            assert delta.error is not None
            assert "no sign of life" in delta.error
            with pytest.raises(EngineDead, match="no sign of life"):
                await asking
            assert not engine.healthy
            assert await other.receive() == Abort("a")
            [refused] = await collect(engine, "b")
            assert refused.error_status == 503
            await other.send(Alive(stepping=True))  # a step may take longer than this test
            while not engine.healthy:
                await asyncio.sleep(0.01)
            again = asyncio.create_task(collect(engine, "c"))
            assert await other.receive() == submit("c")
            await other.send(TokenBatch([TokenDelta("c", [1], finish="stop")]))
            assert await again == [TokenDelta("c", [1], finish="stop")]

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_message_that_makes_no_sense_is_the_end() -> None:
    async def scenario() -> None:
        async with connected() as (engine, other):
            running = asyncio.create_task(collect(engine, "a"))
            await other.receive()
            await other.send_junk()
            [delta] = await running
            assert delta.finish == "error"
            assert not engine.healthy

    asyncio.run(scenario())


def test_loading_is_reported_and_ready_describes_the_model() -> None:
    async def scenario() -> None:
        other = OtherEnd()
        engine, stages = ZmqEngine(*other.addresses), list[Any]()
        await engine.start(on_loading=stages.append)
        ready = Ready(8192, 4096)
        await other.send(Loading("weights"))
        await other.send(ready)
        assert await engine.ready() == ready
        assert stages == ["weights"]
        await engine.close()
        assert await other.receive() == Shutdown()
        other.close()

    asyncio.run(scenario())


def test_an_engine_that_cannot_start_says_why() -> None:
    async def scenario() -> None:
        async with connected() as (engine, other):
            await other.send(Failed("no such layout"))
            with pytest.raises(LoadError, match="no such layout"):
                await engine.ready()
            assert not engine.healthy

    asyncio.run(scenario())
