"""Two real engine processes as one: both are replaced, and then one is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any

import pytest

from one_engine import ask, noted_processes, tokens_of, until
from pippin import supervision
from pippin.config import Config, EngineConfig, ModelConfig, ServerConfig
from pippin.engine.engine_pool import EnginePool
from pippin.errors import EngineDead
from pippin.startup.engines import SupervisedEngine
from pippin.startup.resolve import resolve
from pippin.supervision import EngineProcess
from processes import PATIENCE_SECONDS

PREFIX = list(range(90)) * 2


def config(**server: Any) -> Config:
    return Config(
        model=ModelConfig(backend="fake", fake_step=0.002),
        engine=EngineConfig(max_running=4),
        server=ServerConfig(replicas=2, **server),
    )


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[EngineProcess]:
    return noted_processes(monkeypatch)


def test_two_processes_serve_while_both_are_replaced_and_while_one_is_killed(
    started: list[EngineProcess],
) -> None:
    async def work() -> None:
        supervised = SupervisedEngine(resolve(config()), lambda stage: None)
        running = asyncio.create_task(supervised.run())
        try:
            ready = await supervised.loaded
            assert ready.num_slots == 8
            pool = supervised.engine
            await replace_both(pool, started)
            await kill_one(pool, started[2:])
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
        assert not any(process.is_running() for process in started)

    asyncio.run(asyncio.wait_for(work(), PATIENCE_SECONDS))


async def kill_one(pool: EnginePool, started: list[EngineProcess]) -> None:
    """Of six requests, those of the other engine go on, and new ones are served meanwhile."""
    right = tokens_of(await ask(pool, "first", PREFIX, 300))
    home = next(n for n, each in enumerate(pool.replicas) if len(each.prefixes))
    asked = [asyncio.create_task(ask(pool, f"r{n}", PREFIX, 300)) for n in range(6)]
    await until(lambda: all(replica.num_open for replica in pool.replicas))
    os.kill(started[home].process.pid, signal.SIGKILL)
    await until(lambda: not pool.replicas[home].healthy)
    assert pool.healthy
    assert tokens_of(await ask(pool, "new", PREFIX, 300)) == right
    ends = [deltas[-1] for deltas in await asyncio.gather(*asked)]
    for deltas in [await each for each in asked]:
        got = tokens_of(deltas)
        assert got == right[: len(got)]
        assert (got == right) == (deltas[-1].finish == "length")
    assert {end.error_code for end in ends} <= {None, EngineDead.code}
    assert any(end.finish == "length" for end in ends)


async def replace_both(pool: EnginePool, started: list[EngineProcess]) -> None:
    before = len(started)
    streams = [asyncio.create_task(ask(pool, f"s{n}", [n, 2, 3], 200)) for n in range(4)]
    await until(lambda: all(replica.num_open for replica in pool.replicas))
    pool.restart()
    await until(lambda: len(started) == before + 2)
    assert all(deltas[-1].finish == "length" for deltas in await asyncio.gather(*streams))
    await until(lambda: all(replica.serves for replica in pool.replicas))
    assert (await ask(pool, "last", [1, 2, 3], 2))[-1].finish == "length"


def test_a_replica_that_keeps_dying_is_left_out_until_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one fails for good; then it is wanted again, and both are given up."""

    async def work() -> None:
        supervised = SupervisedEngine(config(engine_restarts=0), lambda stage: None)
        pool = supervised.engine
        failures: asyncio.Queue[str] = asyncio.Queue()
        calls: list[int] = []

        async def run(supervisor: supervision.Supervisor) -> None:
            calls.append(supervised._supervisors.index(supervisor))
            if calls[-1] == 0 and calls.count(0) == 1:
                raise EngineDead(await failures.get())
            raise EngineDead("it died")

        monkeypatch.setattr(supervision.Supervisor, "run", run)
        running = asyncio.create_task(supervised.run())
        await until(lambda: pool.replicas[1].reason == "it died")
        assert not running.done()
        pool.replicas[1].is_wanted.set()
        await until(lambda: calls.count(1) == 2)
        failures.put_nowait("this one too")
        with pytest.raises(EngineDead, match="this one too"):
            await running

    asyncio.run(asyncio.wait_for(work(), PATIENCE_SECONDS))
