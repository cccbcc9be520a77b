"""What the server sends to a new engine process, and where they meet."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from pippin.cache.disk.disk_store import MAX_SEGMENT_BYTES
from pippin.config import Config
from pippin.scheduler.request import FLUSH_SECONDS


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


LAST_STEP_SECONDS = 2.0
SLOWEST_DISK = 128e6  # bytes a second
# What is not synced yet: a segment that the last batch fills, and the one that follows it.
CLOSE_SECONDS = 2 * MAX_SEGMENT_BYTES / SLOWEST_DISK
EXIT_GRACE_SECONDS = LAST_STEP_SECONDS + FLUSH_SECONDS + CLOSE_SECONDS
STOP_GRACE_SECONDS = EXIT_GRACE_SECONDS + 4.0  # to be gone on a machine that is busy
