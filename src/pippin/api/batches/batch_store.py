"""An owner's batches on disk, one record each. Knows no lines and no results."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec

from pippin.api.batches.batch import Batch
from pippin.api.batches.durable import read_records, write_whole
from pippin.api.batches.file_store import StorageFull
from pippin.errors import NotFound, cut

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
