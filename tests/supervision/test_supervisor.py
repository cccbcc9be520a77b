"""An engine process and what keeps it running: its channel, its end, and the next one."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from zmq import ZMQError

from one_engine import OneEngine, ask, noted_processes, tokens_of, until
from pippin import supervision
from pippin.config import Config, EngineConfig, ModelConfig, ServerConfig
from pippin.engine.engine_pool import EnginePool
from pippin.errors import EngineDead, LoadError
from pippin.messages import (
    Answer,
    Failed,
    FromEngine,
    GetStatus,
    Ready,
    Started,
    Submit,
    ToEngine,
    TokenBatch,
    TokenDelta,
    pack_tokens,
)
from pippin.startup.engines import SupervisedEngine
from pippin.startup.resolve import resolve
from pippin.supervision import (
    LONGEST_DELAY_SECONDS,
    Backoff,
    Connection,
    EngineProcess,
    Pulse,
    Supervisor,
    describe_exit,
)
from pippin.types import SamplingParams
from processes import PATIENCE_SECONDS, environment, is_running, wait_until_gone

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


PREFIX = list(range(90)) * 2


def config(**server: Any) -> Config:
    return Config(
        model=ModelConfig(backend="fake", fake_step=0.002),
        engine=EngineConfig(max_running=4),
        server=ServerConfig(replicas=2, **server),
    )


def test_two_processes_serve_while_both_are_replaced_and_while_one_is_killed(
    engines: list[EngineProcess],
) -> None:
    async def work() -> None:
        supervised = SupervisedEngine(resolve(config()), lambda stage: None)
        running = asyncio.create_task(supervised.run())
        try:
            ready = await supervised.loaded
            assert ready.num_slots == 8
            pool = supervised.engine
            await replace_both(pool, engines)
            await kill_one(pool, engines[2:])
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
        assert not any(process.is_running() for process in engines)

    asyncio.run(asyncio.wait_for(work(), PATIENCE_SECONDS))


async def kill_one(pool: EnginePool, engines: list[EngineProcess]) -> None:
    """Of six requests, those of the other engine go on, and new ones are served meanwhile."""
    right = tokens_of(await ask(pool, "first", PREFIX, 300))
    home = next(n for n, each in enumerate(pool.replicas) if len(each.prefixes))
    asked = [asyncio.create_task(ask(pool, f"r{n}", PREFIX, 300)) for n in range(6)]
    await until(lambda: all(replica.num_open for replica in pool.replicas))
    os.kill(engines[home].process.pid, signal.SIGKILL)
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


async def replace_both(pool: EnginePool, engines: list[EngineProcess]) -> None:
    before = len(engines)
    streams = [asyncio.create_task(ask(pool, f"s{n}", [n, 2, 3], 200)) for n in range(4)]
    await until(lambda: all(replica.num_open for replica in pool.replicas))
    pool.restart()
    await until(lambda: len(engines) == before + 2)
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


pytestmark = pytest.mark.slow

TOY = Config(
    model=ModelConfig(backend="fake"), engine=EngineConfig(max_running=4, prefix_cache=False)
)


@pytest.fixture(autouse=True)
def _children_find_pippin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])


def connect(process: EngineProcess) -> Connection:
    return Connection(process.spec.inbox, process.spec.outbox)


async def next_of(connection: Connection, *kinds: type) -> FromEngine:
    while not isinstance(message := await connection.receive(), kinds):
        pass
    return message


async def reply(connection: Connection, submit: Submit) -> list[int]:
    connection.send(submit)
    tokens: list[int] = []
    while True:
        batch = await next_of(connection, TokenBatch)
        assert isinstance(batch, TokenBatch)
        for delta in batch.deltas:
            tokens += delta.tokens
            if delta.finish is not None:
                assert delta.finish == "length"
                return tokens


def test_messages_cross_to_the_engine_and_back_without_files() -> None:
    async def work() -> None:
        with EngineProcess(resolve(TOY)) as process:
            connection = connect(process)
            await next_of(connection, Ready)
            connection.send(GetStatus("a"))
            answer = await next_of(connection, Answer)
            assert isinstance(answer, Answer)
            assert answer.data["running"] == 0
            process.remove_socket_names()
            assert not Path(process.spec.socket_dir).exists()
            params = SamplingParams(max_tokens=8, temperature=0.0)
            assert len(await reply(connection, Submit("b", pack_tokens([1, 2, 3]), params))) == 8
            connection.close()
        assert process.process.returncode == 0

    run(work())


def test_the_engine_does_not_import_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, checkpoint, imported = (tmp_path / name for name in ("torch", "model", "imported"))
    package.mkdir()
    (package / "__init__.py").write_text(f"open({str(imported)!r}, 'w').close()")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]]))
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text('{"model_type": "no_such_type"}')
    (checkpoint / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")  # no tensors

    async def work() -> None:
        config = Config(model=ModelConfig(model=str(checkpoint)))
        with EngineProcess(resolve(config)) as process:
            connection = connect(process)
            failed = await next_of(connection, Failed)
            assert isinstance(failed, Failed)
            assert "no_such_type" in failed.message
            connection.close()

    run(work())
    assert not imported.exists()


def test_stop_leaves_no_process_and_no_socket_behind() -> None:
    with EngineProcess(resolve(TOY)) as process:
        sockets = Path(process.spec.socket_dir)
        assert sockets.is_dir()
    assert process.process.returncode is not None
    assert not sockets.exists()


def test_stop_kills_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "STOP_GRACE_SECONDS", 0.1)
    with EngineProcess(resolve(TOY)) as process:
        os.kill(process.process.pid, signal.SIGSTOP)
    assert process.process.returncode == -signal.SIGKILL


def test_an_engine_that_cannot_be_started_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    children: list[subprocess.Popen[bytes]] = []

    def fails(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        raise BlockingIOError("no more processes")

    def exits_at_once(command: list[str], **kwargs: Any) -> subprocess.Popen[bytes]:
        child = subprocess_popen([sys.executable, "-c", ""], **kwargs)
        assert child.stdin is not None
        closed = select.poll()  # os.waitid is not on every macOS
        closed.register(child.stdin, 0)  # POLLERR or POLLHUP: its other end is closed
        closed.poll()
        children.append(child)
        return child

    subprocess_popen = subprocess.Popen
    for start, error in ((fails, BlockingIOError), (exits_at_once, BrokenPipeError)):
        monkeypatch.setattr(subprocess, "Popen", start)
        with pytest.raises(error):
            EngineProcess(resolve(TOY))
        assert not list(tmp_path.iterdir())
    assert children[0].returncode is not None


def test_the_engine_leaves_when_the_server_is_killed() -> None:
    code = """
import time
from pippin.config import Config, ModelConfig
from pippin.supervision import EngineProcess
from pippin.startup.resolve import resolve
process = EngineProcess(resolve(Config(model=ModelConfig(backend="fake"))))
print(process.process.pid, process.spec.socket_dir, flush=True)
time.sleep(600)
"""
    server = subprocess.Popen([sys.executable, "-c", code], env=environment(), stdout=-1, text=True)
    assert server.stdout is not None
    with server.stdout:
        pid, sockets = server.stdout.readline().split(maxsplit=1)
        server.kill()
        server.wait()
    wait_until_gone(int(pid))
    assert not Path(sockets.strip()).exists()


def test_socket_paths_stay_short_whatever_the_temporary_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with EngineProcess(resolve(TOY)) as process:
        assert len(process.spec.outbox.removeprefix("ipc://")) < 104


def test_exit_codes_read_as_words() -> None:
    assert describe_exit(3) == "exited with status 3"
    assert describe_exit(-11) == "was killed by SIGSEGV"
