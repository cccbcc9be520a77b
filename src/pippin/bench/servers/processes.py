"""Starts servers as child processes, waits until they answer, and stops them in any case.

Knows how to start `pippin serve` and mlx-lm's server; knows nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import httpx

from pippin.bench.client.wire import Target
from pippin.bench.errors import BenchError
from pippin.config import Config

START_SECONDS = 180.0
STOP_SECONDS = 10.0
POLL_SECONDS = 0.1
LOG_TAIL_CHARS = 2000

# mlx-lm as it comes, but with the BLAS that Pippin gives itself, so that both multiply alike.
MLX_LM_SERVER = """
import shutil
from pippin.backends.mlx.cpu.blas import load_fast_blas
load_fast_blas()
import mlx.core as mx
if shutil.which("g++") is None:  # mlx compiles with it on Linux CPUs
    mx.disable_compile()
from mlx_lm.server import main
main()
"""


@contextlib.contextmanager
def pippin_server(
    model: str, options: Sequence[str] = (), *, killed: bool = False
) -> Iterator[Target]:
    """`pippin serve MODEL OPTIONS` on a free port, and nothing out of a pippin.toml.

    With `killed`, it is given no time to end in order.
    """
    port = free_port()
    command = [sys.executable, "-m", "pippin", "serve", model, "--port", str(port)]
    command += ["--config", os.devnull, *options]
    url = f"http://127.0.0.1:{port}"
    with _child("pippin", command, url, killed=killed):
        yield Target(url, first_model(url), extra={"ignore_eos": True})


def as_options(config: Config, without: Sequence[str] = ()) -> list[str]:
    """What `pippin serve` reads this config's model and engine from; the model comes first.

    Commands that lack some of these options name them in `without`.
    """
    options = [config.model.model]
    for section in (config.model, config.engine):
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            flag = field.name.replace("_", "-")
            if field.name in ("model", *without) or value is None:
                continue
            if isinstance(value, bool):
                options.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                options += [f"--{flag}", str(value)]
    return options


@contextlib.contextmanager
def mlx_lm_server(model_dir: Path, options: Sequence[str] = ()) -> Iterator[Target]:
    """mlx-lm's server on a free port. It has no option to ignore the end of a reply."""
    port = free_port()
    command = [sys.executable, "-c", MLX_LM_SERVER, "--model", str(model_dir)]
    command += ["--port", str(port), "--log-level", "WARNING", *options]
    url = f"http://127.0.0.1:{port}"
    with _child("mlx-lm", command, url):
        yield Target(url, "default_model")


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM an exception, so that child processes are ended on this way out too."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def first_model(url: str, api_key: str | None = None) -> str:
    """The name of the model that a server lists first."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=10)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise BenchError(f"{url}/v1/models names no model: {error}; give --model") from error


@contextlib.contextmanager
def _child(name: str, command: Sequence[str], url: str, *, killed: bool = False) -> Iterator[None]:
    with tempfile.TemporaryFile() as log, ended_by_sigterm():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={k: v for k, v in os.environ.items() if k != "PIPPIN_API_KEY"},  # we send none
        )
        try:
            _wait_until_healthy(name, process, url, log)
            yield
        finally:
            _end(process, killed=killed)


def _wait_until_healthy(
    name: str, process: subprocess.Popen[bytes], url: str, log: IO[bytes]
) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BenchError(f"{name} left with status {process.returncode}:\n{_tail(log)}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(POLL_SECONDS)
    raise BenchError(f"{name} did not answer within {START_SECONDS:.0f} s:\n{_tail(log)}")


def _end(process: subprocess.Popen[bytes], *, killed: bool = False) -> None:
    """Ask the whole process group to leave, then make it."""
    ways = [(signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, None)]
    for number, patience in ways[1:] if killed else ways:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            return


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")[-LOG_TAIL_CHARS:].strip()
