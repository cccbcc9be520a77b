"""Starts, wires and supervises the two processes. Knows no HTTP routes and no arrays.

    server (this process)                     engine (child)
      uvicorn, text   ── ToEngine (zmq) ──▶     scheduler, backend
                      ◀── FromEngine ──────
      stdin pipe      ── end of file ─────▶     leaves

The engine dies first, or hangs: its requests end with an error, /health says so and the server
stays up.
The server dies first, even by SIGKILL: the pipe closes and the engine leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import uvicorn
from rich.console import Console
from starlette.types import ASGIApp

from pippin.api.app import create_app
from pippin.api.engine_client import ZmqEngine
from pippin.api.http.connection import allow_open_files, uvicorn_config
from pippin.api.http.door import warn_if_open
from pippin.api.openai import ModelInfo
from pippin.config import Config, LimitsConfig, ServerConfig
from pippin.engine import EngineSpec
from pippin.errors import LoadError
from pippin.logs import configure_logging
from pippin.messages import Ready
from pippin.resolve import resolve
from pippin.text.bundle import TextBundle

SOCKET_PATH_MAX = 100  # sockaddr_un holds 104 bytes on macOS, 108 on Linux
STOP_GRACE_SECONDS = 5.0
WATCH_SECONDS = 0.1


def run_server(config: Config) -> None:
    """Load a model and serve it until SIGINT or SIGTERM."""
    configure_logging(config.server.log_format)
    with _listen(config.server) as listener:  # before a download that may take an hour
        config = resolve(config)
        warn_if_open(config.server)
        allow_open_files(config.limits)
        asyncio.run(_serve(config, listener))


class EngineProcess:
    """A child that runs `pippin.engine`. A context manager: leaving it stops the child."""

    def __init__(self, config: Config) -> None:
        self._sockets = tempfile.TemporaryDirectory(
            prefix="pippin-", dir=_short_dir(), ignore_cleanup_errors=True
        )
        self.spec = EngineSpec(config, self._sockets.name)
        # A session of its own: Ctrl-C reaches the server alone, which then stops the engine.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pippin.engine"], stdin=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(self.spec) + b"\n")
        self.process.stdin.flush()

    async def watch(self, engine: ZmqEngine) -> None:
        """Tell `engine` when the process ends, after what it said last has been read."""
        while (code := self.process.poll()) is None:
            await asyncio.sleep(WATCH_SECONDS)
        await asyncio.sleep(WATCH_SECONDS)
        engine.engine_died(f"the engine process {describe_exit(code)}")

    def stop(self) -> None:
        """Ask it to leave, then make it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(STOP_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._sockets.cleanup()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


class Server(uvicorn.Server):
    """uvicorn, but signals are handled outside and running streams end before it waits for them."""

    def __init__(self, app: ASGIApp, engine: ZmqEngine, limits: LimitsConfig) -> None:
        super().__init__(uvicorn_config(app, limits, timeout_graceful_shutdown=3))
        self._engine = engine

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.engine_died("the server is shutting down")
        await super().shutdown(sockets)


async def _serve(config: Config, listener: socket.socket) -> None:
    stop = _stop_signal()
    console = Console()
    with EngineProcess(config) as process:
        engine = ZmqEngine(
            process.spec.inbox,
            process.spec.outbox,
            timeout_seconds=config.server.engine_timeout,
        )
        with console.status(f"loading {config.server.served_name}") as status:
            await engine.start(on_loading=status.update)
            watcher = asyncio.create_task(process.watch(engine))
            text = TextBundle.load(Path(config.model.model))
            ready = asyncio.create_task(engine.ready())
            await asyncio.wait((ready, stop), return_when=asyncio.FIRST_COMPLETED)
        try:
            if ready.done():
                model = _model_info(config, ready.result())
                app = create_app(engine, text, config.server, model, config.limits)
                console.print(_banner(config.server, listener), highlight=False, soft_wrap=True)
                await _run_until(stop, Server(app, engine, config.limits), listener)
        finally:
            watcher.cancel()
            await engine.close()


def _model_info(config: Config, ready: Ready) -> ModelInfo:
    assert config.server.served_name is not None, "resolved"
    return ModelInfo(
        config.server.served_name, ready.max_len, ready.vocab_size, created_s=int(time.time())
    )


async def _run_until(
    stop: asyncio.Task[Literal[True]], server: Server, listener: socket.socket
) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await asyncio.wait((serving, stop), return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving


def _stop_signal() -> asyncio.Task[Literal[True]]:
    """Done at the first SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return asyncio.create_task(stop.wait())


def _listen(config: ServerConfig) -> socket.socket:
    """Before the model is loaded: a port in use is worth knowing at once."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # By name, since asyncio sends small pieces at once (TCP_NODELAY) only where it sees this.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen()  # whoever reads the banner may connect at once
    except OSError as error:
        listener.close()
        raise LoadError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}"
        ) from error
    return listener


def _banner(config: ServerConfig, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{shown}:{port}"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_key else ""
    body = (
        f'{{"model": "{config.served_name}", "stream": true, '
        '"messages": [{"role": "user", "content": "Tell me a story about a fox."}]}'
    )
    return (
        f"Serving {config.served_name} at {url} (Ctrl-C stops it). Try:\n\n"
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n"
    )


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    return f"was killed by {signal.Signals(-code).name}"


def _short_dir() -> str | None:
    """Where a socket's path stays within the limit; None is the default temporary directory."""
    longest = Path(tempfile.gettempdir()) / "pippin-12345678" / "out"
    return None if len(str(longest)) <= SOCKET_PATH_MAX else "/tmp"
