"""The engine as a process of its own, with the fake backend: how it starts and how it leaves."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from pippin import supervision
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.messages import (
    Answer,
    Failed,
    FromEngine,
    GetStatus,
    Ready,
    Submit,
    TokenBatch,
    pack_tokens,
)
from pippin.startup.resolve import resolve
from pippin.supervision import Connection, EngineProcess, describe_exit
from pippin.types import SamplingParams
from processes import PATIENCE_SECONDS, environment, wait_until_gone

pytestmark = pytest.mark.slow

FAKE = Config(
    model=ModelConfig(backend="fake"), engine=EngineConfig(max_running=4, prefix_cache=False)
)


@pytest.fixture(autouse=True)
def _children_find_pippin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE_SECONDS))


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
        with EngineProcess(resolve(FAKE)) as process:
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
    with EngineProcess(resolve(FAKE)) as process:
        sockets = Path(process.spec.socket_dir)
        assert sockets.is_dir()
    assert process.process.returncode is not None
    assert not sockets.exists()


def test_stop_kills_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "STOP_GRACE_SECONDS", 0.1)
    with EngineProcess(resolve(FAKE)) as process:
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
            EngineProcess(resolve(FAKE))
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
    with EngineProcess(resolve(FAKE)) as process:
        assert len(process.spec.outbox.removeprefix("ipc://")) < 104


def test_exit_codes_read_as_words() -> None:
    assert describe_exit(3) == "exited with status 3"
    assert describe_exit(-11) == "was killed by SIGSEGV"
