"""Starts the server: HTTP in front, a supervised engine behind.

The server listens from the start and returns 503 until the model is loaded. The first SIGINT or
SIGTERM drains it: new requests are refused and running ones may finish. The second one stops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import signal
import socket
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

import uvicorn
from rich.console import Console
from starlette.types import ASGIApp, Receive, Scope, Send

from pippin.api.app import Application, create_waiting_app
from pippin.api.http.access_control import warn_if_open
from pippin.api.http.limited_connection import allow_open_files, uvicorn_config
from pippin.api.http.read_body import return_freed_memory
from pippin.api.served_models import FixedModel, ServedModels
from pippin.backends.nvidia import gpu_ids
from pippin.config import Config, LimitsConfig, ServerConfig
from pippin.engine.engine_pool import EnginePool
from pippin.errors import ConfigError, LoadError
from pippin.logs import configure_logging
from pippin.startup.checkpoint import load_text, model_info
from pippin.startup.engines import (
    BATCH_RUNNING,
    OnDemandModels,
    SupervisedEngine,
    check_several,
    is_on_demand,
    plan_replicas,
)
from pippin.startup.resolve import resolve
from pippin.startup.server_file import announced
from pippin.switching import ModelEngines
from pippin.text.parsers.formats import ReplyFormats

NEXT_PORTS = 100  # tried in order for a free one
FIRST_UNPRIVILEGED = 1024


def listen(config: ServerConfig) -> socket.socket:
    """Before a model is downloaded or loaded: a port in use is an error at once."""
    try:
        return _listen(config.host, config.port)
    except OSError as error:
        reason = f"cannot listen on {config.host}:{config.port}: {error.strerror}"
        raise LoadError(f"{reason}{_remedy(config, error)}") from error


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # By name, since asyncio sends small pieces at once (TCP_NODELAY) only where it sees this.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()  # a client that reads the banner may connect at once
    except OSError:
        listener.close()
        raise
    return listener


def _remedy(config: ServerConfig, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            stop = "stop the program that uses this port"
            free = _free_port(config.host, config.port)
            return f": {stop}, or use a free one: --port {free}" if free else f": {stop}"
        case errno.EACCES if config.port < FIRST_UNPRIVILEGED:
            return f": ports below {FIRST_UNPRIVILEGED} need root: use --port 8000, for example"
        case errno.EADDRNOTAVAIL:
            return (
                ": this machine does not have that address: use --host 127.0.0.1 for local clients "
                "only, or --host 0.0.0.0 for all"
            )
    return ": check --host and --port"


def _free_port(host: str, taken: int) -> int | None:
    """The next one that can be bound now."""
    for port in range(taken + 1, min(taken + 1 + NEXT_PORTS, 65536)):
        with contextlib.suppress(OSError), _listen(host, port):
            return port
    return None


UUID = "GPU-"  # what may be cut short; MIG-... names a part of a GPU, which is not looked up


def check_devices(server: ServerConfig) -> None:
    """Raises ConfigError."""
    if server.devices is None or (found := gpu_ids()) is None:
        return
    if not found:
        remedy = f"--replicas {server.num_replicas} starts engines on one device"
        if server.num_replicas == 1:
            remedy = "without it the engine uses the device that there is"
        raise ConfigError(
            f"devices is {server.devices!r}, and this machine has no NVIDIA GPU that its driver "
            f"shows: remove --devices; {remedy}"
        )
    for name in server.device_names:
        if not _exists(name, found):
            numbers = "0" if len(found) == 1 else f"0 to {len(found) - 1}"
            ids = f" ({', '.join(found)})" if any(found) else ""
            raise ConfigError(
                f"devices names GPU {name}, and this machine has {len(found)}: use {numbers}, or a "
                f"UUID{ids}"
            )


def _exists(name: str, found: Sequence[str]) -> bool:
    if name.isdigit():
        return int(name) < len(found)
    return not name.startswith(UUID) or any(each.startswith(name) for each in found)


def run_server(config: Config, models: Sequence[Config] = ()) -> None:
    """Load a model and serve it until SIGINT or SIGTERM; or several, as requests need them.

    `models`: a config for each, if there are several. `config` has what they share.
    """
    for each in (config, *models):  # names are checked before a download that may take an hour
        ReplyFormats.choose(
            "", tools=each.server.tool_parser, reasoning=each.server.reasoning_parser
        )
    configs = list(models) or [config]
    for each in configs:
        plan_replicas(each)  # likewise
        check_devices(each.server)
    if is_on_demand(configs):
        check_several(config, len(configs))
    configure_logging(config.server.log_format)
    return_freed_memory()
    with listen(config.server) as listener:  # likewise
        configs = [resolve(each) for each in configs]
        warn_if_open(configs[0].server)
        allow_open_files(config.limits)
        asyncio.run(_serve(configs, config, listener))


class Entrance:
    """The server's app: until the model is loaded it returns 503 with Retry-After."""

    def __init__(self, config: ServerConfig) -> None:
        self.app: ASGIApp = create_waiting_app(config, "the model is being loaded")
        self.loaded: Application | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    async def open_with(self, loading: Coroutine[Any, Any, Application]) -> None:
        """Accept requests when the model is loaded. What was made so far is kept: a full collection
        over it would stop all streams for a tenth of a second."""
        app = await loading
        gc.collect()
        gc.freeze()
        self.app = self.loaded = app
        app.resume_batches()

    async def close_batches(self) -> None:
        """Their lines need not finish: they are run again after the next start."""
        if self.loaded is not None:
            await self.loaded.close()


Engines = EnginePool | ModelEngines  # of one model, or of several
NUM_WAITING = 2_048  # connections, to be accepted


class Server(uvicorn.Server):
    """uvicorn, but signals are handled outside and running streams end before it waits for them."""

    def __init__(self, app: ASGIApp, engine: Engines, limits: LimitsConfig) -> None:
        super().__init__(uvicorn_config(app, limits, lifespan="off", timeout_graceful_shutdown=3))
        self._engine = engine

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """asyncio accepts as many connections at once as may wait: few, for the streams' sake."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(NUM_WAITING)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.close()
        await super().shutdown(sockets)


class StopSignals:
    """`first` is done at the first SIGINT or SIGTERM, `second` at the next."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        self.second: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._heard)

    def _heard(self) -> None:
        for signalled in (self.first, self.second):
            if not signalled.done():
                signalled.set_result(None)
                return


async def _serve(configs: Sequence[Config], shared: Config, listener: socket.socket) -> None:
    config = configs[0]
    stop = StopSignals()
    entrance = Entrance(config.server)
    console = Console()
    with console.status(f"loading {config.server.served_name}") as progress:
        source: OnDemandModels | SupervisedEngine
        loading: Coroutine[Any, Any, Application]
        if is_on_demand(configs):
            source = OnDemandModels(configs, shared)
            loading = _app_on_demand(source)
        else:
            source = SupervisedEngine(config, on_loading=progress.update)
            loading = load_app(config, source)
        server = Server(entrance, source.engine, config.limits)
        supervising = asyncio.create_task(source.run())
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        opening = asyncio.create_task(entrance.open_with(loading))
        await _first_of(opening, supervising, serving, stop.first)
    try:
        if opening.done():
            opening.result()
            url = _url_of(listener)
            names = [str(each.server.served_name) for each in configs]
            checkpoints = tuple(each.model.model for each in configs)
            with announced(url, names[0], *checkpoints):
                text = _banner(config.server, url, ", ".join(names))
                console.print(text, highlight=False, soft_wrap=True)
                await _first_of(supervising, serving, stop.first)
        await entrance.close_batches()
        if stop.first.done():
            ends = (supervising, serving, stop.second)
            await _drain(config.server, source.engine, ends, console)
    finally:
        opening.cancel()
        server.should_exit = True
        await serving
        supervising.cancel()  # unless it is done: then it says why
        await asyncio.wait((supervising,))
    if not supervising.cancelled():
        supervising.result()


async def load_app(config: Config, supervised: SupervisedEngine) -> Application:
    """The app of a resolved config, when the model is loaded."""
    text = await asyncio.to_thread(load_text, config)
    ready = await supervised.loaded
    predicts = ready.takes_predictions
    model = model_info(config, ready.max_len, ready.vocab_size, takes_predictions=predicts)
    server = with_batch_running(config.server, ready.num_slots)
    models = ServedModels([FixedModel(supervised.engine, text, model, server, config.limits)])
    return Application(models, server, config.limits)


async def _app_on_demand(source: OnDemandModels) -> Application:
    server = with_batch_running(source.config.server, 4 * BATCH_RUNNING)
    return Application(source.models, server, source.config.limits)


def with_batch_running(config: ServerConfig, num_slots: int) -> ServerConfig:
    """A quarter of what runs at the same time, unless it is given."""
    return replace(config, batch_running=config.batch_running or max(1, num_slots // 4))


async def _drain(
    config: ServerConfig,
    engine: Engines,
    ends: tuple[asyncio.Future[None], ...],
    console: Console,
) -> None:
    """Refuse new requests and let running ones finish, until one of `ends` is done."""
    engine.drain()
    if engine.num_open and config.drain_timeout:
        console.print(
            f"Waiting up to {config.drain_timeout} s for {engine.num_open} running sequences to "
            "finish (a second signal stops at once)."
        )
    drained = asyncio.create_task(engine.drained())
    await _first_of(drained, *ends, timeout=config.drain_timeout)
    drained.cancel()


async def _first_of(*works: asyncio.Future[None], timeout: float | None = None) -> None:
    await asyncio.wait(works, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


def _url_of(listener: socket.socket) -> str:
    """For clients on this machine."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def _banner(config: ServerConfig, url: str, names: str) -> str:
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_key else ""
    body = (
        f'{{"model": "{config.served_name}", "stream": true, '
        '"messages": [{"role": "user", "content": "Tell me a story about a fox."}]}'
    )
    invitation = "Open that in a browser, or try" if config.page else "Try"
    return (
        f"Serving {names} at {url} (Ctrl-C stops it). {invitation}:\n\n"
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'\n"
    )
