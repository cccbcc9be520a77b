"""The files of a cache directory, and the lock of the process that writes.

    DIR/lock                    held (flock) by the one process that writes
    DIR/<model>/00000001.data   segments, with an .index each

One server at a time: a second one is refused, if the first does not exit soon. A reader
(`read_only`) needs no lock. The system releases a lock when its process ends, however it ends.

Directories that other users can write are refused: what they put there would be read as ours.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pippin.cache.entries import Bytes, views
from pippin.errors import DiskCacheError

MAX_PARTS = 512  # of one writev or preadv; systems allow 1,024
MAX_READ_BYTES = 256 << 20  # of an index


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

    def set_time(self, file: int, seconds: float) -> None:
        os.utime(file, (seconds, seconds))

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


NAME_DIGITS = 8
LOOK_S = 0.05  # between two tries to lock

logger = logging.getLogger(__name__)


def refuse_shared(directory: Path, model: bytes) -> None:
    """Raises DiskCacheError if another user can write where this model's entries are read."""
    folder = model_folder(directory, model)
    for path, facts in ((directory, directory.stat()), (folder, _facts(folder))):
        if facts is None:
            continue
        if not stat.S_ISDIR(facts.st_mode):
            raise DiskCacheError(f"{path} is not a directory: remove it")
        if facts.st_uid not in (os.geteuid(), 0):
            raise DiskCacheError(
                f"{path} belongs to user {facts.st_uid}, and this process is user {os.geteuid()}: "
                "choose another --cache-dir, or change its owner (chown -R)"
            )
        # A group of one user has the user's number: a container's volume belongs to such a group.
        private = facts.st_gid == os.getegid() == os.geteuid() != 0
        if facts.st_mode & (stat.S_IWOTH if private else stat.S_IWGRP | stat.S_IWOTH):
            raise DiskCacheError(
                f"other users can write to {path} (mode {stat.S_IMODE(facts.st_mode):o}), and what "
                f"they put there would be used: run chmod -R go-w {path}, or choose another "
                "--cache-dir"
            )


def _facts(path: Path) -> os.stat_result | None:
    """Of the path itself, if it is a link."""
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


class DirectoryLock:
    """The right to write to a directory, until `release`."""

    def __init__(self, directory: Path, patience_s: float = 0.0) -> None:
        """Raises DiskCacheError if another process has it all that time, OSError on others."""
        path = directory / "lock"
        facts = _facts(path)
        if facts is not None and not stat.S_ISREG(facts.st_mode):
            raise DiskCacheError(f"{path} is not a regular file: remove it")
        self._file = open_regular(path, os.O_RDWR | os.O_CREAT)
        try:
            self._take(time.monotonic() + patience_s)
        except OSError as error:
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip()
            os.close(self._file)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise DiskCacheError(
                f"{directory} is in use by process {holder or '?'}: "
                "each server needs a --cache-dir of its own"
            ) from error
        self._note_holder(directory)

    def _note_holder(self, directory: Path) -> None:
        """For the message to a second server. On a full disk the lock works without it."""
        try:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            logger.warning("%s: the process id cannot be written: %s", directory / "lock", error)

    def release(self) -> None:
        os.close(self._file)

    def _take(self, deadline: float) -> None:
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(LOOK_S)


def model_folder(directory: Path, model: bytes) -> Path:
    return directory / model.hex()


def model_folders(directory: Path) -> Iterator[Path]:
    """Of every model that has one."""
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.is_symlink() and re.fullmatch("[0-9a-f]{64}", path.name):
            yield path


def segment_paths(folder: Path) -> Iterator[Path]:
    """Data files in the order in which they were started."""
    for path in sorted(folder.glob("*.data")):
        if len(path.stem) == NAME_DIGITS and path.stem.isdecimal():
            yield path


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:0{NAME_DIGITS}}.data"


def index_path(data: Path) -> Path:
    return data.with_suffix(".index")


def sort_out(files: Files, folder: Path, *, read_only: bool) -> tuple[int, int]:
    """Remove what a crash left unfinished; returns how many files are not ours, and how many
    indexes have no data file."""
    known = {path.stem for path in segment_paths(folder)}
    foreign = lost = 0
    for path in list(folder.iterdir()):
        if path.suffix == ".data" and path.stem in known:
            continue
        if path.suffix == ".new" and not path.is_dir():
            if not read_only:
                files.remove(path)
        elif path.suffix == ".index" and path.stem in known:
            continue
        elif path.suffix == ".index" and path.stem.isdecimal():
            lost += 1
            if not read_only:
                files.remove(path)
        else:
            foreign += 1
    return foreign, lost


class OtherModels:
    """Segments of models that are not served now: they count, and make room first."""

    def __init__(self, files: Files, directory: Path, own: Path) -> None:
        self._files = files
        folders = [folder for folder in model_folders(directory) if folder != own]
        found = [path for folder in folders for path in segment_paths(folder)]
        self._segments = sorted(found, key=lambda path: path.lstat().st_mtime)  # used last: last
        self.num_segments = len(found)
        self.nbytes = sum(map(segment_bytes, found))

    def remove_oldest(self) -> bool:
        """Delete one segment; False if there is none left."""
        if not self._segments:
            return False
        path = self._segments.pop(0)
        self.nbytes -= segment_bytes(path)
        remove_segment(self._files, path)
        return True


def remove_segment(files: Files, path: Path) -> None:
    """The index first: a data file without one was never finished."""
    files.remove(index_path(path))
    files.remove(path)


def segment_bytes(path: Path) -> int:
    """Of both files, as far as they exist."""
    return _size(path) + _size(index_path(path))


def _size(path: Path) -> int:
    facts = _facts(path)
    return 0 if facts is None else facts.st_size
