"""Engines that die, hang or cannot start, with the fake backend; and who is told what."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from zmq import ZMQError

from one_engine import OneEngine, ask, noted_processes, tokens_of, until
from pippin import supervision
from pippin.config import Config, EngineConfig, ModelConfig, ServerConfig
from pippin.errors import EngineDead, LoadError
from pippin.messages import Submit, TokenDelta, pack_tokens
from pippin.startup.resolve import resolve
from pippin.supervision import LONGEST_DELAY_SECONDS, Backoff, EngineProcess, Supervisor
from pippin.types import SamplingParams
from processes import PATIENCE_SECONDS, is_running

FAKE = Config(
    model=ModelConfig(backend="fake"),
    engine=EngineConfig(max_running=1, prefix_cache=False),
)
# An engine that has to wait for a core this long would be taken for one that hangs.
SOON_HUNG = replace(FAKE, server=ServerConfig(heartbeat_timeout=5))

Supervising = asyncio.Task[None]
needs_processes = pytest.mark.slow


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> list[EngineProcess]:
    return noted_processes(monkeypatch)


@asynccontextmanager
async def supervised(config: Config = FAKE) -> AsyncIterator[tuple[OneEngine, Supervising]]:
    client = OneEngine()
    supervisor = Supervisor(resolve(config), client.replica, on_loading=lambda stage: None)
    task = asyncio.create_task(supervisor.run())
    await supervisor.loaded
    try:
        yield client, task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, EngineDead):
            await task


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE_SECONDS))


def collect(client: OneEngine, id: str) -> Coroutine[Any, Any, list[TokenDelta]]:
    return ask(client, id, [1, 2, 3], 4)


async def hold_up_with_one_begun_and_one_waiting(
    client: OneEngine, process: EngineProcess
) -> tuple[asyncio.Task[list[TokenDelta]], asyncio.Task[list[TokenDelta]]]:
    """The engine runs one request at a time, and is stopped in the middle of the first.

    Where we have to wait for a core it may have said everything before it is stopped: once more.
    """

    stopped = asyncio.Event()

    async def begin() -> list[TokenDelta]:
        params = SamplingParams(max_tokens=8000, temperature=0.0, ignore_eos=True)
        said: list[TokenDelta] = []
        async for delta in client.generate(Submit("begun", pack_tokens([1, 2, 3]), params)):
            if not said:
                os.kill(process.process.pid, signal.SIGSTOP)
                stopped.set()
            said.append(delta)
        return said

    while True:
        begun = asyncio.create_task(begin())
        await stopped.wait()
        waiting = asyncio.create_task(collect(client, "waiting"))
        await asyncio.sleep(0.1)  # for what was on its way
        if not begun.done():
            return begun, waiting
        stopped.clear()
        os.kill(process.process.pid, signal.SIGCONT)
        await waiting


def fail_to_start(
    monkeypatch: pytest.MonkeyPatch, error: Exception, *, name: str, succeeding: int
) -> None:
    """After so many that could be started, every other start of an engine fails."""
    real, calls = getattr(supervision, name), itertools.count()

    def start(*args: object) -> object:
        if next(calls) >= succeeding:
            raise error
        return real(*args)

    monkeypatch.setattr(supervision, name, start)


CANNOT_START = [
    ("EngineProcess", OSError(errno.EAGAIN, "Resource temporarily unavailable")),
    ("EngineProcess", BrokenPipeError(errno.EPIPE, "Broken pipe")),
    ("Connection", ZMQError(errno.EMFILE, "Too many open files")),
]
over_failed_starts = pytest.mark.parametrize(("name", "error"), CANNOT_START)


@over_failed_starts
def test_a_first_engine_that_cannot_be_started_is_a_load_error(
    monkeypatch: pytest.MonkeyPatch, engines: list[EngineProcess], name: str, error: Exception
) -> None:
    fail_to_start(monkeypatch, error, name=name, succeeding=0)

    async def work() -> None:
        supervisor = Supervisor(resolve(FAKE), OneEngine().replica, on_loading=lambda stage: None)
        with pytest.raises(LoadError, match="could not be started: ") as raised:
            await supervisor.run()
        assert str(error) in raised.value.message

    run(work())
    assert all(engine.process.returncode is not None for engine in engines)


@needs_processes
@over_failed_starts
def test_an_engine_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
    engines: list[EngineProcess],
    name: str,
    error: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        async with supervised() as (client, _):
            with monkeypatch.context() as patched:
                fail_to_start(patched, error, name=name, succeeding=0)
                os.kill(engines[0].process.pid, signal.SIGKILL)
                await until(lambda: client.reason and "could not be started" in client.reason)
            await until(lambda: client.healthy)
            assert len(tokens_of(await collect(client, "next"))) == 4

    run(work())
    assert "; the engine of stories-hybrid-20m is restarted" in caplog.text


@needs_processes
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, None], ids=str)
def test_an_engine_that_dies_or_hangs_is_replaced(
    engines: list[EngineProcess], number: signal.Signals | None
) -> None:
    async def work() -> None:
        async with supervised(SOON_HUNG if number is None else FAKE) as (client, _):
            begun, waiting = await hold_up_with_one_begun_and_one_waiting(client, engines[0])
            if number is not None:
                os.kill(engines[0].process.pid, number)
                os.kill(engines[0].process.pid, signal.SIGCONT)
            *said, end = await begun
            why = "the engine hangs" if number is None else f"was killed by {number.name}"
            assert end.error is not None
            assert why in end.error
            assert (end.finish, end.error_status) == ("error", 503)
            assert said
            assert all(delta.finish is None for delta in said)
            assert not client.healthy
            assert client.reason is not None
            assert why in client.reason
            served = await waiting
            assert len(tokens_of(served)) == 4
            assert [delta.finish for delta in served if delta.finish] == ["length"]
            assert client.healthy
            assert tokens_of(served) == tokens_of(await collect(client, "again"))
            assert not is_running(engines[0].process.pid)
        assert [process.process.returncode for process in engines[1:]] == [0]
        assert not any(Path(process.spec.socket_dir).exists() for process in engines)

    run(work())


@needs_processes
def test_while_an_engine_serves_nothing_of_the_channel_is_in_the_file_system(
    engines: list[EngineProcess],
) -> None:
    async def work() -> None:
        async with supervised() as (client, _):
            await until(lambda: not Path(engines[0].spec.socket_dir).exists())
            assert (await collect(client, "a"))[-1].finish == "length"

    run(work())


@needs_processes
def test_too_many_deaths_in_a_row_are_the_end(
    engines: list[EngineProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_DELAY_SECONDS", 0.01)
    config = replace(FAKE, server=ServerConfig(engine_restarts=2))

    async def work() -> None:
        async with supervised(config) as (client, supervising):
            for number in range(1, 4):
                await until(lambda number=number: len(engines) == number and client.healthy)
                engines[-1].process.kill()
            with pytest.raises(EngineDead, match=r"failed 3 times in a row.*killed by SIGKILL"):
                await supervising
        assert len(engines) == 3

    run(work())


@needs_processes
def test_an_engine_that_is_lost_while_draining_is_not_replaced(
    engines: list[EngineProcess],
) -> None:
    async def work() -> None:
        async with supervised() as (client, supervising):
            client.drain()
            engines[0].process.kill()
            await supervising
        assert len(engines) == 1

    run(work())


@needs_processes
def test_a_first_engine_that_cannot_load_is_the_end(
    engines: list[EngineProcess], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    (tmp_path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")  # no tensors
    config = resolve(Config(model=ModelConfig(model=str(tmp_path))))

    async def work() -> None:
        with pytest.raises(LoadError, match="no_such_type"):
            await Supervisor(config, OneEngine().replica, on_loading=lambda stage: None).run()
        assert len(engines) == 1

    run(work())


def test_the_first_death_costs_no_wait_and_later_ones_ever_more() -> None:
    backoff = Backoff(max_restarts=20)
    delays = [backoff.died() for _ in range(20)]
    assert delays[:4] == [0.0, 0.5, 1.0, 2.0]
    assert delays[-1] == LONGEST_DELAY_SECONDS
    assert backoff.died() is None


def test_a_finished_request_ends_a_row_of_deaths() -> None:
    backoff = Backoff(max_restarts=2)
    for _ in range(10):
        assert backoff.died() == 0.0
        assert backoff.died() == 0.5
        backoff.finished_request()


def test_without_restarts_the_first_death_is_the_end() -> None:
    assert Backoff(max_restarts=0).died() is None
