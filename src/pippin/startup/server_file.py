"""A small file by which commands find a running server: its address, model and process.

It lies in a directory that only its user can enter, contains no key, and is locked while its server
runs: a file without a lock was left by a process that was killed, and is ignored.

    $XDG_RUNTIME_DIR/pippin/PID.json, or without such a directory $TMPDIR/run-pippin-UID/PID.json
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunningServer:
    url: str
    model: str  # as the API calls it
    pid: int
    started_s: float  # since the epoch
    checkpoints: tuple[str, ...] = ()  # directories of its models' files


def runtime_directory() -> Path:
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and Path(given).is_dir():
        return Path(given) / "pippin"
    return Path(tempfile.gettempdir()) / f"run-pippin-{os.getuid()}"


def make_runtime_directory() -> Path:
    directory = runtime_directory()
    directory.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(directory):
        raise PermissionError(f"{directory} is not a directory that only this user can use")
    return directory


@contextlib.contextmanager
def announced(url: str, model: str, *checkpoints: str) -> Iterator[None]:
    """Let commands of this user find the server at `url` meanwhile."""
    server = RunningServer(url, model, os.getpid(), time.time(), checkpoints)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_locked_file(server))
        except OSError as error:  # a server is useful without it
            logger.warning("`pippin chat` and `pippin status` need --url %s: %s", url, error)
        yield


def running_servers() -> list[RunningServer]:
    """Of this user, on this machine; the one that started last is first."""
    directory = runtime_directory()
    if not _is_private(directory):
        return []
    found = [_read_locked(path) for path in directory.glob("*.json")]
    running = [server for server in found if server is not None]
    return sorted(running, key=lambda server: server.started_s, reverse=True)


@contextlib.contextmanager
def _locked_file(server: RunningServer) -> Iterator[None]:
    directory = make_runtime_directory()
    _remove_unlocked(directory)
    path = directory / f"{server.pid}.json"
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(msgspec.json.encode(server).decode())
        file.flush()
        new.rename(path)  # seen by others from here on, and locked
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another server's file is in it
                directory.rmdir()


def _is_private(directory: Path) -> bool:
    """Another user could put a file there that sends this user's keys to a server of theirs."""
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return False
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return is_own and not stat.S_IMODE(found.st_mode) & 0o077


def _remove_unlocked(directory: Path) -> None:
    for path in directory.glob("*.json"):
        if _read_locked(path) is None:
            path.unlink(missing_ok=True)


def _read_locked(path: Path) -> RunningServer | None:
    """None for the file of a process that is gone."""
    try:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:  # its server runs
                return msgspec.json.decode(file.read(), type=RunningServer)
    except FileNotFoundError:  # its server has exited meanwhile
        pass
    return None
