"""Keeps an engine process running: starts one, detects that it died or hangs, and starts another.

    loading ──▶ serving ──▶ lost: it died, or it hangs and is killed
       ▲                     │    requests that had started end with an error, the others wait
       └──── after a while ◀─┘    too many in a row: the supervisor gives up

The first engine must load: what keeps it from that would keep the next one from it too.

server                                    engine (child)
  Connection      ── ToEngine (zmq) ──▶     Channel
                  ◀── FromEngine ──────
  stdin pipe      ── end of file ─────▶     exits
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec
from zmq import ZMQError

from pippin.config import Config
from pippin.engine.engine_client import Connection, EngineClient
from pippin.engine.engine_spec import STOP_GRACE_SECONDS, EngineSpec
from pippin.errors import EngineDead, LoadError
from pippin.messages import (
    Alive,
    Answer,
    Failed,
    GetStatus,
    Loading,
    Ready,
    TokenBatch,
)

SOCKET_PATH_MAX = 100  # sockaddr_un holds 104 bytes on macOS, 108 on Linux
WATCH_SECONDS = 0.1


class EngineProcess:
    """A context manager: leaving it stops the child."""

    def __init__(
        self,
        config: Config,
        environment: Mapping[str, str] | None = None,
        replica: int | None = None,
    ) -> None:
        """Raises OSError if the system cannot start it; nothing is left behind then.

        `environment`: variables of its own, beside the server's. `replica`: see `EngineSpec`.
        """
        self._sockets = tempfile.TemporaryDirectory(
            prefix="pippin-", dir=_short_dir(), ignore_cleanup_errors=True
        )
        self.spec = EngineSpec(config, self._sockets.name, replica)
        # A session of its own: Ctrl-C reaches the server alone, which then stops the engine.
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pippin.engine.run"],
                stdin=subprocess.PIPE,
                env=os.environ | (environment or {}),
                start_new_session=True,
            )
        except OSError:
            self._sockets.cleanup()
            raise
        try:
            self._send(msgspec.json.encode(self.spec) + b"\n")
        except OSError:
            self.kill()
            self.stop()
            raise

    def _send(self, line: bytes) -> None:
        """Unbuffered: nothing is left to be written when the pipe is closed."""
        assert self.process.stdin is not None
        while line:
            line = line[os.write(self.process.stdin.fileno(), line) :]

    def remove_socket_names(self) -> None:
        """Both sides are connected: the files are not needed any more, and none is left behind."""
        self._sockets.cleanup()

    async def ended(self) -> str:
        """Waits for its end, and for its last messages to be read; how it ended."""
        while (code := self.process.poll()) is None:
            await asyncio.sleep(WATCH_SECONDS)
        await asyncio.sleep(WATCH_SECONDS)
        return f"the engine process {describe_exit(code)}"

    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()

    def stop(self) -> None:
        """Ask it to exit; kill it if it does not in time."""
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


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    return f"was killed by {signal.Signals(-code).name}"


def _short_dir() -> str | None:
    """Where a socket's path stays within the limit; None is the default temporary directory."""
    longest = Path(tempfile.gettempdir()) / "pippin-12345678" / "out"
    return None if len(str(longest)) <= SOCKET_PATH_MAX else "/tmp"


class Pulse:
    def __init__(self, *, silence_limit: float, step_limit: float) -> None:
        self._silence_limit = silence_limit
        self._step_limit = step_limit
        self._turn: float | None = None  # seconds; None before the first one: loading may take long
        self._silence = 0.0  # seconds

    def beat(self, turn_seconds: float) -> None:
        """A heartbeat arrived."""
        self._turn = turn_seconds
        self._silence = 0.0

    def pass_time(self, seconds: float) -> None:
        """Time in which a heartbeat would have been received.

        A server that was suspended itself must not count that time: heartbeats wait in its socket.
        """
        if self._turn is not None:
            self._silence += seconds

    @property
    def complaint(self) -> str | None:
        """Why the engine counts as hung; None while it does not."""
        if self._silence >= self._silence_limit:
            return (
                f"the engine hangs: no heartbeat for {self._silence:.0f} s (limit: "
                f"--heartbeat-timeout {self._silence_limit:g})"
            )
        if self._turn is not None and self._turn >= self._step_limit:
            return (
                f"the engine hangs: one step has taken {self._turn:.0f} s so far (limit: "
                f"--engine-timeout {self._step_limit:g})"
            )
        return None


TICK_SECONDS = 0.25
FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0
HANDSHAKE = "handshake"  # the id of a question whose answer proves that both sockets are connected

logger = logging.getLogger(__name__)


class Backoff:
    """When to restart the engine. Failures are in a row if no request finished between them."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self.deaths = 0

    def finished_request(self) -> None:
        self.deaths = 0

    def died(self) -> float | None:
        """Seconds to wait before the next start; None: no more restarts."""
        self.deaths += 1
        if self.deaths > self._max_restarts:
            return None
        if self.deaths == 1:  # whatever it was, it may well not happen again
            return 0.0
        return min(FIRST_DELAY_SECONDS * 2.0 ** (self.deaths - 2), LONGEST_DELAY_SECONDS)


class Supervisor:
    def __init__(
        self,
        config: Config,
        client: EngineClient,
        on_loading: Callable[[str], None],
        *,
        environment: Mapping[str, str] | None = None,
        replica: int | None = None,
    ) -> None:
        """`on_loading` is called with each stage of the first load; `loaded` is its result.

        `environment` and `replica`: of each engine process.
        """
        self.loaded: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._config = config
        self._client = client
        self._on_loading = on_loading
        self._environment = environment
        self._replica = replica
        self._backoff = Backoff(config.server.engine_restarts)
        self._stopped_itself = False  # the engine said why it ends: that is all it had to say

    async def run(self) -> None:
        """Until it is cancelled, or an engine ends that need not be replaced.

        Raises LoadError if there is no first engine, EngineDead if there were too many.
        """
        while True:
            reason = await self._run_engine()
            if not self.loaded.done():
                raise LoadError(reason)
            if self._client.draining:
                return
            if self._client.exited_as_asked():
                continue
            delay = self._backoff.died()
            if delay is None:
                in_a_row = (
                    f"the engine failed {self._backoff.deaths} times in a row (limit: "
                    f"--engine-restarts {self._config.server.engine_restarts}); the last reason: "
                )
                raise EngineDead((in_a_row if self._backoff.deaths > 1 else "") + reason)
            when = f"in {delay:g} s" if delay else "now"
            logger.error("%s; %s is restarted %s", reason, self._name, when)
            await asyncio.sleep(delay)

    @property
    def _name(self) -> str:
        replica = "" if self._replica is None else f"replica {self._replica} of "
        return f"the engine of {replica}{self._config.server.served_name}"

    def forgive(self) -> None:
        """Engines that were lost before do not count: `run` may be called again."""
        self._backoff = Backoff(self._config.server.engine_restarts)

    async def _run_engine(self) -> str:
        """One engine, from its start to its end; the reason why it ended."""
        try:
            process, connection = self._start()
        except (OSError, ZMQError) as error:  # no memory, no descriptor: that may change
            reason = f"the engine process could not be started: {error}"
            self._client.engine_lost(reason)
            return reason
        self._stopped_itself = False
        server = self._config.server
        pulse = Pulse(silence_limit=server.heartbeat_timeout, step_limit=server.engine_timeout)
        try:
            reason = await _first_of(
                self._listen(connection, process, pulse), process.ended(), _hang(pulse)
            )
            self._client.engine_lost(reason, knows_all=self._stopped_itself)
            if pulse.complaint is not None:
                process.kill()
            return reason
        finally:
            connection.close()
            await asyncio.to_thread(process.stop)

    def _start(self) -> tuple[EngineProcess, Connection]:
        process = EngineProcess(self._config, self._environment, self._replica)
        try:
            return process, Connection(process.spec.inbox, process.spec.outbox, process.is_running)
        except ZMQError:
            process.kill()
            process.stop()
            raise

    async def _listen(self, connection: Connection, process: EngineProcess, pulse: Pulse) -> str:
        """Receive messages until the engine reports that it stops; the reason."""
        began = time.monotonic()
        while True:
            try:
                message = await connection.receive()
            except EngineDead as error:
                process.kill()
                return error.message
            match message:
                case Alive(turn_seconds=turn_seconds):
                    pulse.beat(turn_seconds)
                case Loading(stage=stage):
                    if not self.loaded.done():
                        self._on_loading(stage)
                case Failed(message=reason):
                    self._stopped_itself = True
                    return reason
                case Ready():
                    pulse.beat(0.0)
                    connection.send(GetStatus(HANDSHAKE))
                    if self.loaded.done():
                        load_s = time.monotonic() - began
                        logger.warning("%s was restarted and loaded in %.1f s", self._name, load_s)
                    else:
                        self.loaded.set_result(message)
                    self._client.engine_ready(connection)
                case Answer(id=id) if id == HANDSHAKE:
                    process.remove_socket_names()
                case TokenBatch(deltas=deltas):
                    if any(delta.finish in ("stop", "length") for delta in deltas):
                        self._backoff.finished_request()
                    self._client.deliver(message)
                case _:
                    self._client.deliver(message)


async def _hang(pulse: Pulse) -> str:
    """Returns when the engine counts as hung; the reason."""
    while (complaint := pulse.complaint) is None:
        await asyncio.sleep(TICK_SECONDS)
        pulse.pass_time(TICK_SECONDS)  # of this loop's time, however long it took
    return complaint


async def _first_of(*works: Coroutine[Any, Any, str]) -> str:
    """The result of the first to end; the others are cancelled, and so are all if this is."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
