"""Files and batches in a directory: a SQLite database, and the content of uploaded files beside it.

The results of a batch are rows, which a file names when the batch has ended. A process may be
killed at any time: what is not in the database was not stored.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import msgspec

from pippin.errors import NotFound, NotReady, PippinError, RequestError, cut


class BatchUsage(msgspec.Struct):
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, usage: dict[str, Any]) -> None:
        """`usage` of one reply of any endpoint."""
        for name in ("prompt_tokens", "input_tokens"):
            self.input_tokens += usage.get(name, 0)
            self.cached_tokens += usage.get(f"{name}_details", {}).get("cached_tokens", 0)
        for name in ("completion_tokens", "output_tokens"):
            self.output_tokens += usage.get(name, 0)
            self.reasoning_tokens += usage.get(f"{name}_details", {}).get("reasoning_tokens", 0)

    def wire(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
FINISHED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")
WINDOWS_S = {"24h": 24 * 3600}
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_TIMED = [status for status in get_args(Status) if status != "validating"]


class LineError(msgspec.Struct, frozen=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    model: str  # empty: its lines name several
    created_at: int
    metadata: dict[str, str | None] | None = None
    output_expires_s: int | None = None
    status: Status = "validating"
    times: dict[str, int] = msgspec.field(default_factory=dict)  # when each status began
    errors: list[LineError] = msgspec.field(default_factory=list)
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: BatchUsage | None = None  # before the first line is run
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.status in FINISHED

    @property
    def expires_at(self) -> int:
        return self.created_at + WINDOWS_S[self.completion_window]

    def results_id(self, kind: str) -> str:
        """Of the file of its results: the same after a restart."""
        return f"file-{hashlib.sha256(f'{self.id} {kind}'.encode()).hexdigest()[:32]}"

    def enter(self, status: Status, now: float) -> None:
        self.status = status
        self.times[status] = int(now)

    def wire(self) -> dict[str, Any]:
        errors = [msgspec.structs.asdict(error) for error in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model or None,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(status) for status in _TIMED},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "usage": self.usage and self.usage.wire(),
            "metadata": self.metadata,
        }


MAX_FILES = 1_000  # of one owner
MAX_BATCHES = 1_000  # of one owner; the oldest finished one is forgotten first
MAX_NAME_CHARS = 255
LINES_A_PAGE = 64  # of results that are read at a time
SCHEMA = """
    PRAGMA locking_mode = EXCLUSIVE;
    PRAGMA auto_vacuum = FULL;
    PRAGMA journal_mode = WAL;
    CREATE TABLE IF NOT EXISTS files (
        id TEXT PRIMARY KEY, owner TEXT, filename TEXT, purpose TEXT, created_at INTEGER,
        nbytes INTEGER, expires_at INTEGER
    );
    CREATE TABLE IF NOT EXISTS batches (id TEXT PRIMARY KEY, owner TEXT, batch BLOB);
    CREATE TABLE IF NOT EXISTS results (owner TEXT, file TEXT, line BLOB);
    CREATE INDEX IF NOT EXISTS lines ON results (file);
"""


def new_id(prefix: str) -> str:
    """Ids sort in order of creation."""
    return f"{prefix}{time.time_ns():016x}{uuid.uuid4().hex[:16]}"


@contextmanager
def storage_errors() -> Iterator[None]:
    """The disk is full, or cannot be written."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise PippinError(
            f"the directory of files (--batch-dir) cannot be used: {why}", code="storage_failed"
        ) from error


class Database:
    """One server has it. Threads may share it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        path = directory / "batches.sqlite3"
        with storage_errors():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(
                path, timeout=0, isolation_level=None, check_same_thread=False
            )
            try:
                self._db.executescript(SCHEMA)
            except sqlite3.OperationalError as error:
                self._db.close()
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:  # or a kind of it
                    raise
                raise NotReady(
                    "another server uses the directory of files and batches: start this one with "
                    "a --batch-dir of its own"
                ) from error
            known = {id for (id,) in self.rows("SELECT id FROM files")}
            for content in directory.glob("file-*.jsonl"):
                if content.stem not in known:  # it was being uploaded or deleted
                    content.unlink()

    def rows(self, sql: str, *values: Any) -> list[Any]:
        with self._lock, storage_errors():
            return self._db.execute(sql, values).fetchall()

    def write(self, *statements: tuple[Any, ...], durable: bool = True) -> None:
        """All or none of them, each with its values. Not even a power failure loses what is
        durable; a crash of this process loses nothing of the others either."""
        with self._lock, storage_errors():
            self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._db.execute("BEGIN")
            try:
                for sql, *values in statements:
                    self._db.execute(sql, values)
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def close(self) -> None:
        with self._lock:
            self._db.close()


class FileRecord(msgspec.Struct, frozen=True):
    id: str
    filename: str
    purpose: str
    created_at: int
    nbytes: int
    expires_at: int | None = None

    def wire(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.nbytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


_SELECT = "SELECT id, filename, purpose, created_at, nbytes, expires_at FROM files WHERE owner = ?"


class OwnerStore:
    """The files and batches of one owner: of an API key, or of every client of a server without
    keys. Threads may share it."""

    def __init__(
        self,
        database: Database,
        name: str,
        state: Mapping[str, Any] | None = None,
        *,
        max_bytes: int,
        max_file_bytes: int,
    ) -> None:
        self._database = database
        self._owner = name
        self.state = state or {}  # of its requests
        self.turn = asyncio.Lock()  # one of its batches runs at a time
        self._max_bytes = max_bytes
        self.max_file_bytes = min(max_bytes, max_file_bytes)
        self._lock = threading.RLock()
        uploaded = "SELECT SUM(nbytes) FROM files WHERE purpose = 'batch' AND owner = ?"
        results = "SELECT SUM(LENGTH(line)) FROM results WHERE owner = ?"
        # of all content, results of running batches and uploads included
        self.nbytes: int = sum(database.rows(sql, name)[0][0] or 0 for sql in (uploaded, results))
        found = database.rows("SELECT batch FROM batches WHERE owner = ? ORDER BY id", name)
        batches = [msgspec.json.decode(record, type=Batch) for (record,) in found]
        self.batches = {batch.id: batch for batch in batches}  # in order of creation

    def path(self, id: str) -> Path:
        """Of the content of an uploaded file."""
        return self._database.directory / f"{id}.jsonl"

    def file(self, id: str) -> FileRecord:
        with self._lock:
            self._delete_expired()
            found = self._database.rows(f"{_SELECT} AND id = ?", self._owner, id)
        if not found:
            raise NotFound(f"No such File object: {cut(id)}", param="id", code="file_not_found")
        return FileRecord(*found[0])

    def files(self) -> list[FileRecord]:
        """The oldest first."""
        with self._lock:
            self._delete_expired()
            found = self._database.rows(f"{_SELECT} ORDER BY rowid", self._owner)
        return [FileRecord(*row) for row in found]

    def delete_file(self, id: str) -> None:
        with self._lock:
            self._remove(self.file(id))

    def upload(self) -> Upload:
        num_files = len(self.files())
        if num_files >= MAX_FILES:
            raise RequestError(
                f"{num_files:,} files are stored, and at most {MAX_FILES:,} are "
                "allowed: delete some with DELETE /v1/files/{id}",
                code="storage_limit_exceeded",
            )
        return Upload(self, new_id("file-"))

    def claim(self, nbytes: int) -> None:
        """Negative: it is free."""
        with self._lock:
            if nbytes > 0 and self.nbytes + nbytes > self._max_bytes:
                raise RequestError(
                    f"the stored files would have more than {self._max_bytes:,} bytes, which is "
                    "the limit for one API key (--batch-bytes): delete some with "
                    "DELETE /v1/files/{id}",
                    code="storage_limit_exceeded",
                )
            self.nbytes += nbytes

    def add_file(
        self, id: str, filename: str, purpose: str, expires_s: int | None, nbytes: int
    ) -> FileRecord:
        """List a file whose content is stored."""
        created = int(time.time())
        expires_at = None if expires_s is None else created + expires_s
        record = FileRecord(id, filename[:MAX_NAME_CHARS], purpose, created, nbytes, expires_at)
        insert = "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)"
        _, *fields = msgspec.structs.astuple(record)
        self._database.write((insert, id, self._owner, *fields))
        return record

    def add_results(self, id: str, filename: str, expires_s: int | None) -> None:
        """The same of rows."""
        sql = "SELECT SUM(LENGTH(line)) FROM results WHERE file = ?"
        nbytes = self._database.rows(sql, id)[0][0]
        self.add_file(id, filename, "batch_output", expires_s, nbytes)

    def append(self, id: str, line: bytes) -> None:
        """A result. Computing it again costs less than waiting for the disk at each of them."""
        self.claim(len(line))
        try:
            insert = "INSERT INTO results VALUES (?, ?, ?)"
            self._database.write((insert, self._owner, id, line), durable=False)
        except PippinError:
            self.claim(-len(line))
            raise

    def results(self, id: str) -> Iterator[list[bytes]]:
        """The lines of a file of results, some at a time."""
        sql = "SELECT rowid, line FROM results WHERE file = ? AND rowid > ? ORDER BY rowid LIMIT ?"
        last = 0
        while rows := self._database.rows(sql, id, last, LINES_A_PAGE):
            last = rows[-1][0]
            yield [line for _, line in rows]

    def _remove(self, record: FileRecord) -> None:
        self._database.write(
            ("DELETE FROM files WHERE id = ?", record.id),
            ("DELETE FROM results WHERE file = ?", record.id),
        )
        self.nbytes -= record.nbytes
        with storage_errors():  # content alone is deleted at the next start
            self.path(record.id).unlink(missing_ok=True)

    def _delete_expired(self) -> None:
        found = self._database.rows(f"{_SELECT} AND expires_at <= ?", self._owner, time.time())
        for row in found:
            self._remove(FileRecord(*row))

    def batch(self, id: str) -> Batch:
        if id not in self.batches:
            raise NotFound(
                f"No batch found with id '{cut(id)}'.", param="id", code="batch_not_found"
            )
        return self.batches[id]

    def add_batch(self, batch: Batch) -> None:
        if len(self.batches) >= MAX_BATCHES:
            self._forget_oldest()
        self.save(batch)
        self.batches[batch.id] = batch

    def save(self, batch: Batch) -> None:
        with self._lock:  # of threads that save one batch, each writes its latest state
            insert = "INSERT OR REPLACE INTO batches VALUES (?, ?, ?)"
            self._database.write((insert, batch.id, self._owner, msgspec.json.encode(batch)))

    def _forget_oldest(self) -> None:
        oldest = next((batch for batch in self.batches.values() if batch.is_finished), None)
        if oldest is None:
            raise RequestError(
                f"{len(self.batches):,} batches have not finished, and at most {MAX_BATCHES:,} "
                "are allowed: wait for one, or cancel one",
                code="storage_limit_exceeded",
            )
        self._database.write(("DELETE FROM batches WHERE id = ?", oldest.id))
        del self.batches[oldest.id]


class Upload:
    """A file that arrives. Until `finish` it is not listed; `discard` deletes what there is.

    A thread may still write when the request has ended: that has no effect.
    """

    def __init__(self, store: OwnerStore, id: str) -> None:
        self._store = store
        self._id = id
        self._path = store.path(id)
        self._file: BinaryIO | None = None
        self._lock = threading.Lock()
        self._ended = False
        self.nbytes = 0

    def write(self, data: bytes) -> None:
        with self._lock:
            if self._ended:
                return
            if self.nbytes + len(data) > self._store.max_file_bytes:
                raise PippinError(
                    f"the file is larger than {self._store.max_file_bytes:,} bytes, the limit for "
                    "one file (--batch-file-bytes)",
                    param="file",
                    code="file_too_large",
                )
            self._store.claim(len(data))
            self.nbytes += len(data)
            with storage_errors():
                if self._file is None:
                    number = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
                    self._file = open(number, "wb")  # noqa: SIM115
                self._file.write(data)

    def seek(self, offset: int) -> None:
        """Starlette's parser does it at the end of a file."""

    def finish(self, filename: str, purpose: str, expires_s: int | None) -> FileRecord:
        assert self._file is not None, "an empty file was refused"
        with storage_errors():
            self._file.flush()
            os.fsync(self._file.fileno())
            folder = os.open(self._path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        record = self._store.add_file(self._id, filename, purpose, expires_s, self.nbytes)
        self._ended = True
        self._file.close()
        return record

    def discard(self) -> None:
        """After `finish` there is nothing to delete."""
        with self._lock:
            if not self._ended:
                self._ended = True
                if self._file is not None:
                    self._file.close()
                self._path.unlink(missing_ok=True)
                self._store.claim(-self.nbytes)
