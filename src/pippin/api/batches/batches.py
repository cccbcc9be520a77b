"""All owners' files and batches in one directory, which one server uses at a time.

    DIR/lock        held (flock) by that server
    DIR/<owner>/    a digest of the owner's API key; `all` on a server without keys

Nothing is created before a client sends a file. Batches that have not finished are resumed when
the directory is opened: at start, if it exists. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pippin.api.batches.batch import Batch
from pippin.api.batches.batch_store import BatchStore
from pippin.api.batches.file_store import FileStore, StorageFailed
from pippin.api.batches.runner import BatchOwner, BatchRunner
from pippin.api.http.access_control import owner_state
from pippin.errors import NotFound, NotReady, RequestError


@dataclass(frozen=True)
class Storage:
    directory: Path | None  # None: there are no files and no batches
    owners: tuple[bytes, ...]
    separates: bool  # the prefixes of its owners
    max_bytes: int
    max_file_bytes: int


class Batches:
    def __init__(self, storage: Storage, runner: BatchRunner) -> None:
        self._storage = storage
        self._runner = runner
        self._owners: dict[bytes, BatchOwner] = {}
        self._lock: int | None = None

    def resume(self) -> None:
        """Go on with what an earlier server left, if it left anything."""
        directory = self._storage.directory
        if directory is not None and directory.exists():
            self._open(directory)

    def of(self, owner: bytes) -> BatchOwner:
        if self._storage.directory is None:
            raise NotFound(
                "this server stores no files and runs no batches: start it with --batch-bytes "
                "above 0"
            )
        if self._lock is None:
            self._open(self._storage.directory)
        return self._owners[owner]

    async def create(self, owner: BatchOwner, batch: Batch) -> None:
        try:
            await asyncio.to_thread(owner.batches.add, batch)
        except OSError as error:
            raise storage_failed(error) from error
        self._runner.start(owner, batch)

    async def cancel(self, owner: BatchOwner, batch: Batch) -> dict[str, Any]:
        """The batch as it was then: it may be cancelled before its record is written."""
        if batch.status == "cancelling":
            return batch.wire()
        if batch.status not in ("validating", "in_progress"):
            raise RequestError(f"Cannot cancel a batch with status '{batch.status}'.")
        self._runner.cancel(batch)
        shown = batch.wire()
        try:
            await asyncio.to_thread(owner.batches.save, batch)
        except OSError as error:
            raise storage_failed(error) from error
        return shown

    async def close(self) -> None:
        await self._runner.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            self._owners.clear()

    def _open(self, directory: Path) -> None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _locked(directory)
            try:
                self._owners = {owner: self._load(directory, owner) for owner in self._known()}
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            raise storage_failed(error) from error
        self._lock = lock
        for owner in self._owners.values():
            for batch in owner.batches.batches():
                if not batch.is_finished:
                    self._runner.start(owner, batch)

    def _known(self) -> Iterable[bytes]:
        return self._storage.owners or (b"",)

    def _load(self, directory: Path, owner: bytes) -> BatchOwner:
        storage, folder = self._storage, directory / _folder_name(owner)
        folder.mkdir(mode=0o700, exist_ok=True)
        files = FileStore(
            folder,
            max_bytes=storage.max_bytes // max(1, len(storage.owners)),
            max_file_bytes=storage.max_file_bytes,
        )
        state = owner_state(owner, separates=storage.separates) if owner else {}
        return BatchOwner(state, files, BatchStore(folder))


def storage_failed(error: OSError) -> StorageFailed:
    return StorageFailed(
        f"the directory of files (--batch-dir) cannot be used: {error.strerror or error}"
    )


def _folder_name(owner: bytes) -> str:
    return (
        hmac.digest(owner, b"pippin files of an API key", "sha256").hex()[:32] if owner else "all"
    )


def _locked(directory: Path) -> int:
    file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(file)
        raise NotReady(
            "another server uses the directory of files and batches: start this one with a "
            "--batch-dir of its own"
        ) from error
    return file
