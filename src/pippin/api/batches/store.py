"""Records in files, each whole after a crash, as it was or as it is to be. Knows no field."""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from pippin.api.batches.batch import Batch
from pippin.api.http.http_errors import BodyTooLarge
from pippin.errors import NotFound, PippinError, RequestError, cut

log = logging.getLogger(__name__)

T = TypeVar("T")


def new_id(prefix: str) -> str:
    """Ids sort in order of creation."""
    return f"{prefix}{time.time_ns():016x}{uuid.uuid4().hex[:16]}"


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file; after this call neither a crash nor a power failure loses it."""
    new = path.with_name(f"{path.name}.new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """What was created, renamed or removed in it."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read_records(paths: Iterable[Path], kind: type[T]) -> list[T]:
    """Those that can be read: of a damaged one the log has the name."""
    found = []
    for path in paths:
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=kind))
        except msgspec.DecodeError as error:
            log.warning("%s is damaged and not used: %s", path, error)
    return found


MAX_FILES = 1_000  # of one owner
MAX_NAME_CHARS = 255


class FileNotFound(NotFound):
    code = "file_not_found"


class FileTooLarge(BodyTooLarge):
    code = "file_too_large"


class StorageFull(RequestError):
    code = "storage_limit_exceeded"


class StorageFailed(PippinError):
    """The disk is full, or cannot be written."""

    status = 507
    code = "storage_failed"


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


class FileStore:
    """Of one owner. Threads may share it."""

    def __init__(self, folder: Path, *, max_bytes: int, max_file_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self.max_file_bytes = min(max_bytes, max_file_bytes)
        self._records: dict[str, FileRecord] = {}  # in order of creation
        self._lock = threading.RLock()
        self.nbytes = 0  # of all content, results of running batches and uploads included
        self._load()

    def path(self, id: str) -> Path:
        return self._folder / f"{id}.jsonl"

    def get(self, id: str) -> FileRecord:
        with self._lock:
            self._delete_expired()
            if id not in self._records:
                raise FileNotFound(f"No such File object: {cut(id)}", param="id")
            return self._records[id]

    def records(self) -> list[FileRecord]:
        """The oldest first."""
        with self._lock:
            self._delete_expired()
            return list(self._records.values())

    def delete(self, id: str) -> None:
        with self._lock:
            self.get(id)
            self._remove(id)

    def upload(self) -> Upload:
        with self._lock:
            self._delete_expired()
            if len(self._records) >= MAX_FILES:
                raise StorageFull(
                    f"{len(self._records):,} files are stored, and at most {MAX_FILES:,} are "
                    "allowed: delete some with DELETE /v1/files/{id}"
                )
        return Upload(self, self._folder / f"{new_id('file-')}.part")

    def claim(self, nbytes: int) -> None:
        with self._lock:
            if self.nbytes + nbytes > self._max_bytes:
                raise StorageFull(
                    f"the stored files would have more than {self._max_bytes:,} bytes, which is "
                    "the limit for one API key (--batch-bytes): delete some with "
                    "DELETE /v1/files/{id}"
                )
            self.nbytes += nbytes

    def release(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes -= nbytes

    def add(
        self, id: str, filename: str, purpose: str, expires_s: int | None, content: Path
    ) -> FileRecord:
        """List a file whose content is at `content`, where it is moved from."""
        created = int(time.time())
        expires_at = None if expires_s is None else created + expires_s
        nbytes = content.stat().st_size
        record = FileRecord(id, filename[:MAX_NAME_CHARS], purpose, created, nbytes, expires_at)
        write_whole(self._record_path(id), msgspec.json.encode(record))
        if content != self.path(id):
            content.replace(self.path(id))
            sync_folder(self._folder)
        with self._lock:
            self._records[id] = record
        return record

    def _record_path(self, id: str) -> Path:
        return self._folder / f"{id}.json"

    def _remove(self, id: str) -> None:
        """The content first: a record alone is removed at the next start."""
        self.path(id).unlink(missing_ok=True)
        self._record_path(id).unlink(missing_ok=True)
        self.nbytes -= self._records.pop(id).nbytes

    def _delete_expired(self) -> None:
        now = time.time()
        for record in list(self._records.values()):
            if record.expires_at is not None and record.expires_at <= now:
                self._remove(record.id)

    def _load(self) -> None:
        for path in [*self._folder.glob("*.part"), *self._folder.glob("*.new")]:
            path.unlink()
        found = []
        for record in read_records(self._folder.glob("file-*.json"), FileRecord):
            if self.path(record.id).exists():
                found.append(record)
            else:
                self._record_path(record.id).unlink(missing_ok=True)
        found.sort(key=lambda record: (record.created_at, record.id))
        self._records = {record.id: record for record in found}
        self.nbytes = sum(path.stat().st_size for path in self._folder.glob("file-*.jsonl"))


class Upload:
    """A file that arrives. Until `finish` it is not listed; `discard` deletes what there is.

    A thread may still write when the request has ended: that has no effect.
    """

    def __init__(self, store: FileStore, path: Path) -> None:
        self._store = store
        self._path = path
        self._file: BinaryIO | None = None
        self._lock = threading.Lock()
        self._ended = False
        self.nbytes = 0

    def write(self, data: bytes) -> None:
        with self._lock:
            if not self._ended:
                self._write(data)

    def finish(self, filename: str, purpose: str, expires_s: int | None) -> FileRecord:
        assert self._file is not None, "an empty file was refused"
        self._file.flush()
        os.fsync(self._file.fileno())
        record = self._store.add(self._path.stem, filename, purpose, expires_s, self._path)
        self.nbytes = 0  # the store's from now on
        return record

    def discard(self) -> None:
        """After `finish` there is nothing to delete."""
        with self._lock:
            self._ended = True
            if self._file is not None:
                self._file.close()
            self._path.unlink(missing_ok=True)
            self._store.release(self.nbytes)

    def _write(self, data: bytes) -> None:
        if self.nbytes + len(data) > self._store.max_file_bytes:
            raise FileTooLarge(
                f"the file is larger than {self._store.max_file_bytes:,} bytes, the limit for one "
                "file (--batch-file-bytes)",
                param="file",
            )
        self._store.claim(len(data))
        self.nbytes += len(data)
        if self._file is None:
            self._file = open(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600), "wb")  # noqa: SIM115
        self._file.write(data)


MAX_BATCHES = 1_000  # of one owner; the oldest finished one is forgotten first


class BatchNotFound(NotFound):
    code = "batch_not_found"


class BatchStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        found = read_records(folder.glob("batch_*.json"), Batch)
        found.sort(key=lambda batch: batch.id)
        self._batches = {batch.id: batch for batch in found}  # in order of creation

    def batches(self) -> list[Batch]:
        return list(self._batches.values())

    def get(self, id: str) -> Batch:
        if id not in self._batches:
            raise BatchNotFound(f"No batch found with id '{cut(id)}'.", param="id")
        return self._batches[id]

    def add(self, batch: Batch) -> None:
        if len(self._batches) >= MAX_BATCHES:
            self._forget_oldest()
        self.save(batch)
        self._batches[batch.id] = batch

    def save(self, batch: Batch) -> None:
        with self._lock:  # of threads that save one batch, each writes its latest state
            write_whole(self._path(batch), msgspec.json.encode(batch))

    def _forget_oldest(self) -> None:
        oldest = next((batch for batch in self._batches.values() if batch.is_finished), None)
        if oldest is None:
            raise StorageFull(
                f"{len(self._batches):,} batches have not finished, and at most {MAX_BATCHES:,} "
                "are allowed: wait for one, or cancel one"
            )
        self._path(oldest).unlink(missing_ok=True)
        del self._batches[oldest.id]

    def _path(self, batch: Batch) -> Path:
        return self._folder / f"{batch.id}.json"
