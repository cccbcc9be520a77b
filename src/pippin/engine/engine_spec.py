"""What the server sends to a new engine process, and where they meet. Knows no engine."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from pippin.config import Config


@dataclass(frozen=True)
class EngineSpec:
    """As JSON, on the first line of its standard input."""

    config: Config  # resolved: the model is a directory, the backend has a name
    socket_dir: str
    replica: int | None = None  # its number; None: the only engine of its server

    @property
    def inbox(self) -> str:
        return f"ipc://{self.socket_dir}/in"

    @property
    def outbox(self) -> str:
        return f"ipc://{self.socket_dir}/out"

    def remove_sockets(self) -> None:
        """What a server that was killed could not clean up itself."""
        directory = Path(self.socket_dir)
        for name in ("in", "out"):
            (directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the server was first
            directory.rmdir()
