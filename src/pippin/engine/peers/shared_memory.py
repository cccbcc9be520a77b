"""Memory that two engines on one machine have mapped: payloads pass through it.

    sender     copies a payload to its place behind the last one, if enough was taken before
    receiver   copies it out, and says how far it has come

Positions count all bytes since the start. A payload lies in one piece: one that would pass the end
of the memory starts at its beginning.
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pippin.cache import entries
from pippin.cache.entries import Bytes

RING_BYTES = 32 << 20
MAX_RING_BYTES = 1 << 30  # that is mapped, whatever the other end says
TOKEN_BYTES = 32
OLD_SECONDS = 120.0  # of a name: the answer takes far less
NAME = re.compile(r"pippin-[0-9a-f]{32}")
FOLDERS = ("/dev/shm", tempfile.gettempdir())  # the second one where the first is not there


class OutgoingMemory:
    """Made by the sender. The name of its file is gone as soon as the other end has answered, so
    nothing is left behind when both have ended. One that is killed before that leaves its file to
    the next one to remove.
    """

    def __init__(self, nbytes: int = RING_BYTES) -> None:
        """Raises OSError where there is no room for it: all of it is written to once."""
        self.name = f"pippin-{secrets.token_hex(16)}"
        self.nbytes = nbytes
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._path = _folder() / self.name
        _remove_old(self._path.parent)
        self._head = self._tail = 0
        try:
            with open(self._path, "xb+", opener=_open_private) as file:
                file.write(self.token.ljust(nbytes, b"\0"))
                file.flush()
                self._memory = _map(file.fileno(), nbytes)
        except OSError:
            self.remove_name()
            raise

    def remove_name(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def place(self, nbytes: int) -> int | None:
        """The position of a payload of 1 to all bytes; None until more was taken."""
        at = self._head
        if at % self.nbytes + nbytes > self.nbytes:
            at += self.nbytes - at % self.nbytes
        if self._tail == self._head:  # all was taken
            self._tail = at
        if at + nbytes - self._tail > self.nbytes:
            return None
        self._head = at + nbytes
        return at

    def write(self, at: int, payload: Sequence[Bytes]) -> None:
        at %= self.nbytes
        for view in entries.views(payload):
            self._memory[at : at + len(view)] = np.frombuffer(view, np.uint8)
            at += len(view)

    def free(self, end: int) -> bool:
        """What lies before this position was taken; False if it cannot have been."""
        is_valid = self._tail <= end <= self._head
        if is_valid:
            self._tail = end
        return is_valid


class IncomingMemory:
    """The same memory, as the receiver has mapped it."""

    def __init__(self, name: str, nbytes: int, token: bytes) -> None:
        """Raises OSError where it is not there, or is not what the sender made."""
        if not NAME.fullmatch(name) or not TOKEN_BYTES <= nbytes <= MAX_RING_BYTES:
            raise OSError(f"no memory of {nbytes:,} bytes is named {name}")
        descriptor = os.open(_folder() / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            is_private = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            if not is_private or found.st_size != nbytes:
                raise OSError(f"{name} is not a file of {nbytes:,} bytes of this user")
            self._memory = _map(descriptor, nbytes)
        finally:
            os.close(descriptor)
        if not hmac.compare_digest(self._memory[:TOKEN_BYTES].tobytes(), token):
            raise OSError(f"{name} is another memory of that name")
        self.nbytes = nbytes

    def read(self, at: int, arrays: Sequence[Bytes]) -> bool:
        """False: no payload of this size can lie there."""
        at %= self.nbytes
        views = entries.views(arrays)
        if at + sum(len(view) for view in views) > self.nbytes:
            return False
        for view in views:
            np.frombuffer(view, np.uint8)[:] = self._memory[at : at + len(view)]
            at += len(view)
        return True


def _folder() -> Path:
    return next(Path(folder) for folder in FOLDERS if os.access(folder, os.W_OK))


def _remove_old(folder: Path) -> None:
    for path in folder.glob("pippin-*"):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            is_old = time.time() - path.stat().st_mtime > OLD_SECONDS
            if is_old and NAME.fullmatch(path.name):
                path.unlink()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _map(descriptor: int, nbytes: int) -> Bytes:
    return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)
