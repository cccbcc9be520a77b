"""`pippin serve` from the outside: one command, signals, and a process that dies."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

import processes
from bundled import BUNDLED_PATH
from pippin import cli
from processes import (
    PATIENCE_SECONDS,
    Served,
    environment,
    is_running,
    wait_until,
    wait_until_gone,
)

pytestmark = pytest.mark.slow

CHAT = {
    "messages": [{"role": "user", "content": "hello"}],
    "model": "stories-hybrid-20m",
    "temperature": 0,  # a drawn token may end the reply
}
NEVER_HUNG = ("--heartbeat-timeout", "3600")  # an engine that is stopped is not replaced


def serve(*options: str, stderr: int | None = None, **env: str) -> AbstractContextManager[Served]:
    """With the fake backend."""
    return processes.serve(
        "--backend", "fake", *options, stderr=stderr, env={**environment(), **env}
    )


@contextmanager
def stopped(pid: int) -> Iterator[int]:
    """A process held up; it goes on at the end if it is still there, and so can leave."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def get(served: Served, path: str) -> httpx.Response:
    return httpx.get(f"{served.url}{path}")


def is_listening(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


class Gate:
    """A pipe that stands for the engine's log of steps: no engine loads while nobody reads it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "steps"
        os.mkfifo(self._path)
        self._reader: int | None = None

    @property
    def options(self) -> tuple[str, str]:
        return "--step-log", str(self._path)

    def open(self) -> None:
        self._reader = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK)

    def close(self) -> None:
        if self._reader is not None:
            os.close(self._reader)
            self._reader = None


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    gate = Gate(tmp_path)
    yield gate
    gate.close()


@contextmanager
def running_request(served: Served) -> Iterator[Callable[[], str]]:
    """A long stream that the engine has started; yields what reads the rest of it."""
    body = {**CHAT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    url = f"{served.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_SECONDS) as reply:
        chunks = reply.iter_text()
        read = next(chunks)
        while '"content":"' not in read.replace('"content":""', ""):
            read += next(chunks)
        yield lambda: "".join(chunks)


@contextmanager
def waiting_request(served: Served) -> Iterator[Callable[[], str]]:
    """A stream that the server has taken, while its engine is stopped; yields what reads it."""
    body = {**CHAT, "max_tokens": 4, "stream": True}
    url = f"{served.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_SECONDS) as reply:
        assert reply.status_code == 200
        yield lambda: reply.read().decode()


def serve_and_fail(*argv: str, **env: str) -> tuple[int, str]:
    """Exit status and stderr of a server that cannot start."""
    done = subprocess.run(
        [sys.executable, "-m", "pippin", "serve", *argv],
        env={**environment(), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def test_the_banner_holds_a_curl_that_works_and_ctrl_c_ends_both_processes() -> None:
    with serve() as served:
        curl, _, url, _, header, _, body = shlex.split(served.read_command())
        assert curl == "curl"
        reply = httpx.post(url, headers=dict([header.split(": ")]), content=body)
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        *_, finish, done = reply.text.strip().split("\n\n")
        assert '"finish_reason":"stop"' in finish
        assert done == "data: [DONE]"
        engine_pid = served.engine_pid
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(PATIENCE_SECONDS) == 0
        assert not is_running(engine_pid)


def test_a_signal_lets_requests_finish_and_takes_no_more() -> None:
    with serve(*NEVER_HUNG) as served, stopped(served.engine_pid) as engine_pid:
        with waiting_request(served) as read:
            served.process.terminate()
            wait_until(lambda: get(served, "/ready").status_code == 503)
            assert get(served, "/health").status_code == 200
            refused = httpx.post(f"{served.url}/v1/chat/completions", json=CHAT)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert "shutting down" in refused.json()["error"]["message"]
            os.kill(engine_pid, signal.SIGCONT)
            assert '"finish_reason":"length"' in read()
        assert served.process.wait(PATIENCE_SECONDS) == 0
        assert not is_running(engine_pid)


@pytest.mark.parametrize("patience", ["0", "1000"])
def test_what_does_not_finish_in_time_ends_with_an_error(patience: str) -> None:
    """After no time at all, and after a second signal."""
    options = (*NEVER_HUNG, "--drain-timeout", patience)
    with serve(*options) as served, stopped(served.engine_pid) as engine_pid:
        with waiting_request(served) as read:
            served.process.terminate()
            if patience != "0":
                wait_until(lambda: get(served, "/ready").status_code == 503)
                served.process.send_signal(signal.SIGINT)
            said = read()
            assert "shutting down" in said
            assert '"finish_reason":"' not in said
        assert served.process.wait(PATIENCE_SECONDS) == 0
        assert not is_running(engine_pid)


def test_a_dead_engine_is_replaced_and_what_waited_is_served(gate: Gate) -> None:
    gate.open()
    with (
        serve(*NEVER_HUNG, *gate.options) as served,
        running_request(served) as read_running,
        stopped(served.engine_pid) as engine_pid,
        waiting_request(served) as read,
    ):
        gate.close()
        os.kill(engine_pid, signal.SIGKILL)
        wait_until(lambda: get(served, "/health").status_code == 503)
        assert "killed by SIGKILL" in get(served, "/ready").json()["error"]["message"]
        gate.open()
        assert "engine_dead" in read_running()
        assert '"finish_reason":"length"' in read()
        assert get(served, "/health").status_code == get(served, "/ready").status_code == 200
        assert served.engine_pid != engine_pid


def test_a_server_whose_engines_keep_dying_ends_with_a_status(tmp_path: Path) -> None:
    own = ("--batch-dir", str(tmp_path))  # else it may warn of a server of another test
    with serve("--engine-restarts", "0", *own, stderr=subprocess.PIPE) as served:
        os.kill(served.engine_pid, signal.SIGKILL)
        assert served.process.wait(PATIENCE_SECONDS) == 1
        assert served.process.stderr is not None
        assert served.process.stderr.read().splitlines() == [
            "pippin: the engine process was killed by SIGKILL"
        ]


def test_the_server_answers_while_the_model_is_loaded(gate: Gate) -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "pippin", "serve", "--port", str(port), "--backend", "fake"]
    command += gate.options
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE) as process:
        try:
            wait_until(lambda: is_listening(port))
            early = [httpx.get(f"{url}{path}") for path in ("/health", "/v1/models")]
            gate.open()
            wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200)
            assert httpx.get(f"{url}/v1/models").status_code == 200
        finally:
            process.terminate()
    for answer in early:
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        assert "being loaded" in answer.json()["error"]["message"]


def test_nothing_stays_behind_though_everybody_is_killed(tmp_path: Path) -> None:
    with serve(TMPDIR=str(tmp_path)) as served:
        wait_until(lambda: not list(tmp_path.glob("pippin-*")))
        engine_pid = served.engine_pid
        os.kill(engine_pid, signal.SIGSTOP)  # it cannot tidy up
        served.process.kill()
        os.kill(engine_pid, signal.SIGKILL)
        wait_until_gone(engine_pid)
    assert not list(tmp_path.glob("pippin-*"))


def test_the_engine_does_not_outlive_a_killed_server() -> None:
    with serve() as served:
        engine_pid = served.engine_pid
        served.process.kill()
        served.process.wait(PATIENCE_SECONDS)
        wait_until_gone(engine_pid)


def test_commands_find_a_running_server_by_a_file_without_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PIPPIN_API_KEY", "PIPPIN_ADMIN_KEY"):
        monkeypatch.setenv(name, f"secret-{name}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("pippin.terminal.server_client.DEFAULT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    with serve() as served:
        for command in ("status", "chat"):
            with pytest.raises(SystemExit) as exited:
                cli.main([command])
            shown = capsys.readouterr()
            assert (exited.value.code, served.url in shown.out + shown.err) == (0, True), shown.err
            assert shown.out.strip()
        (file,) = (tmp_path / "pippin").iterdir()
        assert served.url in file.read_text()
        assert "secret" not in file.read_text()
        served.process.terminate()
        assert served.process.wait(PATIENCE_SECONDS) == 0
    assert not (tmp_path / "pippin").exists()


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, err = serve_and_fail("--backend", "fake", "--port", str(port))
    assert status == 1
    assert err.startswith(f"pippin: cannot listen on 127.0.0.1:{port}: Address already in use: ")
    assert err.count("\n") == 1


def test_the_port_is_tried_before_a_model_is_looked_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, err = serve_and_fail(
            "some/model", "--port", port, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path)
        )
    assert (status, "cannot listen" in err) == (1, True)


def test_an_empty_key_in_the_environment_does_not_open_the_door() -> None:
    status, err = serve_and_fail("--backend", "fake", "--port", "0", PIPPIN_API_KEY="")
    assert (status, "PIPPIN_API_KEY is set and empty" in err) == (2, True)


def test_a_hub_out_of_reach_is_one_line(tmp_path: Path) -> None:
    status, err = serve_and_fail(
        "some/model", "--port", "0", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path)
    )
    assert status == 1
    assert err.splitlines() == [
        "pippin: model 'some/model' is neither a directory nor in the local cache, and the Hugging "
        "Face hub cannot be reached: check the network and HF_HUB_OFFLINE, or give a directory"
    ]


def test_a_checkpoint_that_cannot_be_loaded_is_named_and_nothing_stays_behind(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    (tmp_path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")  # no tensors
    shutil.copy(BUNDLED_PATH / "tokenizer.json", tmp_path)
    status, err = serve_and_fail(str(tmp_path), "--port", "0", TMPDIR=str(tmp_path))
    assert status == 1
    assert "no_such_type" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert not list(tmp_path.glob("pippin-*"))
