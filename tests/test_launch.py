"""Two processes that live and die together, with the fake backend."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from pippin.api.engine_client import ZmqEngine
from pippin.config import Config, EngineConfig, ModelConfig, ServerConfig
from pippin.errors import LoadError
from pippin.launch import EngineProcess, describe_exit
from pippin.messages import Submit, TokenDelta
from pippin.resolve import resolve
from pippin.types import SamplingParams
from processes import environment, wait_until_gone

pytestmark = pytest.mark.slow

FAKE = Config(
    model=ModelConfig(backend="fake"), engine=EngineConfig(max_running=4, prefix_cache=False)
)


@pytest.fixture(autouse=True)
def _children_find_pippin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


async def connect(process: EngineProcess, timeout_seconds: float = 60.0) -> ZmqEngine:
    engine = ZmqEngine(process.spec.inbox, process.spec.outbox, timeout_seconds=timeout_seconds)
    await engine.start()
    await engine.ready()
    return engine


async def collect(engine: ZmqEngine, id: str, max_tokens: int = 8) -> list[TokenDelta]:
    submit = Submit(id, [1, 2, 3], SamplingParams(max_tokens=max_tokens, temperature=0.0))
    return [delta async for delta in engine.generate(submit)]


def test_a_request_crosses_to_the_engine_and_back() -> None:
    async def work() -> None:
        with EngineProcess(resolve(FAKE)) as process:
            engine = await connect(process)
            deltas = await collect(engine, "a")
            assert sum(len(delta.tokens) for delta in deltas) == 8
            assert [delta.finish for delta in deltas if delta.finish] == ["length"]
            assert (await engine.status())["running"] == 0
            assert set(await engine.flush_cache()) == {"freed_bytes", "kept_bytes"}
            await engine.close()

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
            engine = ZmqEngine(process.spec.inbox, process.spec.outbox)
            await engine.start()
            with pytest.raises(LoadError, match="no_such_type"):
                await engine.ready()
            await engine.close()

    run(work())
    assert not imported.exists()


def test_stop_leaves_no_process_and_no_socket_behind() -> None:
    with EngineProcess(resolve(FAKE)) as process:
        sockets = Path(process.spec.socket_dir)
        assert sockets.is_dir()
    assert process.process.returncode is not None
    assert not sockets.exists()


def test_stop_kills_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pippin.launch.STOP_GRACE_SECONDS", 0.1)
    with EngineProcess(resolve(FAKE)) as process:
        os.kill(process.process.pid, signal.SIGSTOP)
    assert process.process.returncode == -signal.SIGKILL


def test_a_killed_engine_ends_its_requests_with_an_error() -> None:
    async def work() -> None:
        with EngineProcess(resolve(FAKE)) as process:
            engine = await connect(process)
            watcher = asyncio.create_task(process.watch(engine))
            os.kill(process.process.pid, signal.SIGSTOP)  # so that the request is surely pending
            pending = asyncio.create_task(collect(engine, "a"))
            await asyncio.sleep(0.05)
            os.kill(process.process.pid, signal.SIGKILL)
            (delta,) = await pending
            assert (delta.finish, delta.error_status) == ("error", 503)
            assert delta.error == "the engine process was killed by SIGKILL"
            assert not engine.healthy
            await watcher
            await engine.close()

    run(work())


def test_a_frozen_engine_is_not_healthy_until_it_goes_on() -> None:
    async def work() -> None:
        with EngineProcess(resolve(FAKE)) as process:
            engine = await connect(process, timeout_seconds=3.0)
            assert engine.healthy
            os.kill(process.process.pid, signal.SIGSTOP)
            (delta,) = await collect(engine, "a")
            assert (delta.finish, delta.error_status) == ("error", 503)
            assert not engine.healthy
            os.kill(process.process.pid, signal.SIGCONT)
            while not engine.healthy:
                await asyncio.sleep(0.05)
            assert (await collect(engine, "b"))[-1].finish == "length"
            await engine.close()

    run(work())


def test_the_engine_leaves_when_the_server_is_killed() -> None:
    code = """
import time
from pippin.config import Config, ModelConfig
from pippin.launch import EngineProcess
from pippin.resolve import resolve
process = EngineProcess(resolve(Config(model=ModelConfig(backend="fake"))))
print(process.process.pid, process.spec.socket_dir, flush=True)
time.sleep(60)
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


def test_a_missing_model_is_named_with_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"no model 'nothing'.*stories-hybrid-20m"):
        resolve(Config(model=ModelConfig(model="nothing")))
    with pytest.raises(LoadError, match=r"has no config\.json"):
        resolve(Config(model=ModelConfig(model=str(tmp_path))))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(LoadError, match=r"has no model\*\.safetensors"):
        resolve(Config(model=ModelConfig(model=str(tmp_path))))
    with pytest.raises(LoadError, match="is a file"):
        resolve(Config(model=ModelConfig(model=str(tmp_path / "config.json"))))


def test_resolve_decides_what_was_left_open() -> None:
    resolved = resolve(Config())
    assert resolved.model.backend == "mlx"
    assert Path(resolved.model.model, "model.safetensors").is_file()
    assert resolved.server.served_name == "stories-hybrid-20m"
    named = resolve(Config(server=ServerConfig(served_name="mine")))
    assert named.server.served_name == "mine"
