"""Every change to a file of the store, as few verbs. Knows no format.

A write is made at an offset that the caller names, whole or with an error. Tests replace `Files` by
one that records each verb, so that a crash after any of them can be simulated, or by one whose disk
is full.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from pippin.cache.entries.blocks import views
from pippin.cache.entries.entry import Bytes

MAX_PARTS = 512  # of one writev or preadv; systems allow 1,024
MAX_READ_BYTES = 256 << 20  # of a file that is read whole: an index, an order of use


def open_regular(path: Path, flags: int, mode: int = 0o600) -> int:
    """A descriptor of a regular file. A link, a device, a FIFO are an OSError, at once: someone
    else may have put them there."""
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_whole(path: Path) -> bytes:
    """Raises OSError for what is larger than we write, or no regular file."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        content = file.read(MAX_READ_BYTES + 1)
    if len(content) > MAX_READ_BYTES:
        raise OSError(errno.EFBIG, f"larger than {MAX_READ_BYTES:,} bytes", str(path))
    return content


class Files:
    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """A new, empty file; returns its descriptor."""
        return open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def open(self, path: Path, *, read_only: bool) -> int:
        return open_regular(path, os.O_RDONLY if read_only else os.O_RDWR)

    def write(self, file: int, at: int, parts: Sequence[Bytes | bytes]) -> None:
        """All of the parts one after the other, from `at` on. By one thread at a time."""
        left = views(parts)
        os.lseek(file, at, os.SEEK_SET)
        while left:
            done = os.writev(file, left[:MAX_PARTS])
            left = rest_of(left, done)

    def truncate(self, file: int, size: int) -> None:
        os.ftruncate(file, size)

    def sync(self, file: int) -> None:
        """On the disk itself, as far as the system says so."""
        os.fsync(file)

    def replace(self, path: Path, content: bytes) -> None:
        """A file with this content in place of the one there was; never half of it."""
        new = path.with_name(path.name + ".new")
        self.remove(new)
        file = self.create(new)
        try:
            self.write(file, 0, [content])
            self.sync(file)
        finally:
            os.close(file)
        self.rename(new, path)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)


def read_into(file: int, path: Path, at: int, parts: Sequence[memoryview]) -> int:
    """Fill the parts from `at` on; returns how many bytes there were. Any thread may call."""
    left = list(parts)
    total = 0
    if hasattr(os, "preadv"):
        while left:
            done = os.preadv(file, left[:MAX_PARTS], at + total)
            if not done:
                break
            total += done
            left = rest_of(left, done)
        return total
    # A place in the file that no other thread moves.
    with open(open_regular(path, os.O_RDONLY), "rb", buffering=0) as own:
        own.seek(at)
        while left:
            done = own.readinto(left[0])
            if not done:
                break
            total += done
            left = rest_of(left, done)
    return total


def rest_of(parts: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the parts after their first `done` bytes."""
    for index, part in enumerate(parts):
        if done < len(part):
            return [part[done:], *parts[index + 1 :]]
        done -= len(part)
    return []
