"""Results of a batch, appended to two files as they arrive. Knows no line of the input.

What has a result is read from the files, so that after a crash no line is answered twice. A crash
in the middle of a line leaves it without its end: it is cut off, and that request is run again.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

import msgspec

from pippin.api.batches.batch import Batch
from pippin.api.batches.file_store import FileStore
from pippin.api.batches.usage import BatchUsage, ReplyUsage

SYNC_SECONDS = 1.0  # at most so much is lost when the power fails; it is computed again
OUTPUT, ERRORS = "output", "errors"


class _Reply(msgspec.Struct, frozen=True):
    usage: ReplyUsage | None = None  # an error has none


class _Response(msgspec.Struct, frozen=True):
    body: _Reply | None = None


class _Known(msgspec.Struct, frozen=True):
    custom_id: str
    response: _Response | None = None  # of a request that expired there is none


class Results:
    """Threads may share it."""

    def __init__(self, batch: Batch, files: FileStore) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._open = True
        self._synced_at = monotonic()
        self.done: set[str] = set()
        self.counts = dict.fromkeys((OUTPUT, ERRORS), 0)
        self.usage = BatchUsage()
        self._logs = {
            kind: _ResultFile(files.path(batch.results_id(kind)), files) for kind in self.counts
        }
        for kind, log in self._logs.items():
            for known in log.recover():
                self._count(kind, known)

    def append(self, kind: str, custom_id: str, result: dict[str, Any]) -> bool:
        """Whether it was added: nothing is after `close`, and nothing twice."""
        with self._lock:
            if not self._open or custom_id in self.done:
                return False
            line = msgspec.json.encode(result) + b"\n"
            self._logs[kind].append(line)
            self._count(kind, msgspec.json.decode(line, type=_Known))
            if monotonic() - self._synced_at >= SYNC_SECONDS:
                self._sync()
            return True

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                try:
                    self._sync()
                finally:
                    for log in self._logs.values():
                        log.close()

    def _count(self, kind: str, known: _Known) -> None:
        if known.custom_id in self.done:
            return
        self.done.add(known.custom_id)
        self.counts[kind] += 1
        reply = None if known.response is None else known.response.body
        if reply is not None and reply.usage is not None:
            self.usage.add(reply.usage)

    def _sync(self) -> None:
        for log in self._logs.values():
            log.sync()
        self._synced_at = monotonic()


class _ResultFile:
    def __init__(self, path: Path, files: FileStore) -> None:
        self._path = path
        self._files = files
        self._file: BinaryIO | None = None
        self._nbytes = 0  # of whole lines

    def recover(self) -> list[_Known]:
        """The results that are here. What follows the last whole line is cut off."""
        known: list[_Known] = []
        if not self._path.exists():
            return known
        with self._path.open("r+b") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    known.append(msgspec.json.decode(line, type=_Known))
                except msgspec.DecodeError:  # written before the power failed, in part
                    break
                self._nbytes += len(line)
            self._files.release(os.fstat(file.fileno()).st_size - self._nbytes)
            file.truncate(self._nbytes)
        return known

    def append(self, line: bytes) -> None:
        """All of it, or an OSError and nothing."""
        self._files.claim(len(line))
        try:
            if self._file is None:
                number = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
                self._file = open(number, "wb", buffering=0)  # noqa: SIM115
                self._file.seek(self._nbytes)
            _write_all(self._file, line)
        except OSError:
            self._files.release(len(line))
            if self._file is not None:
                self._file.truncate(self._nbytes)
                self._file.seek(self._nbytes)
            raise
        self._nbytes += len(line)

    def sync(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _write_all(file: BinaryIO, line: bytes) -> None:
    """A full disk takes a part of it, and refuses the next."""
    rest = memoryview(line)
    while rest:
        rest = rest[file.write(rest) :]
