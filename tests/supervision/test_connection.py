"""The server's end of the channel, against sockets of a test, and when an engine counts as hung."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import zmq
import zmq.asyncio

from pippin.errors import EngineDead
from pippin.messages import (
    FromEngine,
    Started,
    Submit,
    ToEngine,
    TokenBatch,
    TokenDelta,
    pack_tokens,
)
from pippin.supervision import Connection, Pulse
from pippin.types import SamplingParams
from processes import PATIENCE_SECONDS


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


def test_messages_arrive_as_they_were_sent_in_their_order() -> None:
    async def scenario() -> None:
        other = OtherEnd()
        connection = Connection(*other.addresses)
        submit = Submit(
            "a", pack_tokens([1, 2]), SamplingParams(logit_bias={5: 1.0}, stop=("x",)), [2], [1]
        )
        connection.send(submit)
        assert await other.receive() == submit
        batch = TokenBatch([TokenDelta("a", [1], finish="stop")])
        for message in (Started(["a"]), batch):
            await other.send(message)
        assert [await connection.receive() for _ in range(2)] == [Started(["a"]), batch]
        connection.close()
        other.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))


def test_a_message_that_makes_no_sense_is_an_error() -> None:
    async def scenario() -> None:
        other = OtherEnd()
        connection = Connection(*other.addresses)
        await other.send_junk()
        with pytest.raises(EngineDead, match="cannot be decoded"):
            await connection.receive()
        connection.close()
        other.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))


def test_an_engine_hangs_after_a_silence_or_in_a_step_but_may_load_for_long() -> None:
    pulse = Pulse(silence_limit=30.0, step_limit=300.0)
    pulse.pass_time(1e6)
    assert pulse.complaint is None, "it loads"
    for turn in range(100):
        pulse.beat(float(turn))
        pulse.pass_time(29)
        assert pulse.complaint is None
    pulse.pass_time(1)
    assert pulse.complaint == (
        "the engine hangs: no heartbeat for 30 s (limit: --heartbeat-timeout 30)"
    )
    pulse.beat(299.0)
    assert pulse.complaint is None
    pulse.beat(300.0)
    assert pulse.complaint == (
        "the engine hangs: one step has taken 300 s so far (limit: --engine-timeout 300)"
    )
