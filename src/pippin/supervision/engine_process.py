"""A child process that runs `pippin.engine.run`.

server                                    engine (child)
  Connection      ── ToEngine (zmq) ──▶     Channel
                  ◀── FromEngine ──────
  stdin pipe      ── end of file ─────▶     exits
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pippin.config import Config
from pippin.engine.engine_spec import STOP_GRACE_SECONDS, EngineSpec

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
