"""The store of entries in a directory: all its verbs, over segments. Knows no tree and no device.

threads   one writes at a time; any may read, touch, forget and count, and none of these waits
          for a write
crash     `kill -9` costs what was being written: every entry that `write` returned is found again
power     segments are synced when they are full, at `flush` and at `close`; before that, a power
          failure may lose or tear what was written last. Digests notice: it costs hits
errors    a write that fails is undone and counted, and writing pauses for some seconds
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Lock

from pippin.cache.disk.directory import (
    RECENCY,
    DirectoryLock,
    Files,
    model_folder,
    model_folders,
    open_regular,
    refuse_shared,
    remove_segment,
    segment_bytes,
    segment_paths,
)
from pippin.cache.disk.segment import HEADER, Slot, decode_header, model_digest
from pippin.cache.disk.segment_log import Catalog, SegmentLog
from pippin.cache.entries.entry import Block, Bytes, Entry, Key, Loaded, Workers, divided
from pippin.cache.entries.entry_store import Destination, StoreCounters, check_sizes
from pippin.errors import DiskCacheError

logger = logging.getLogger(__name__)

PAUSE_S = 10.0  # after a write that failed
RECENCY_S = 60.0
NUM_THREADS = 8  # that read: a few copy from the page cache and hash as fast as memory allows
FULL = (errno.ENOSPC, errno.EDQUOT)


def open_store(
    directory: Path,
    fingerprint: bytes,
    max_bytes: int,
    *,
    read_only: bool = False,
    patience_s: float = 0.0,
    files: Files | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> DiskStore:
    """The store of a model in a directory, which is made if it is not there.

    Raises DiskCacheError if another process has it locked for `patience_s`, if other users can
    write to it, or it cannot exist.
    Where nothing can be written, what is there is served (`DiskStore.read_only`).
    """
    files = files or Files()
    lock: DirectoryLock | None = None
    try:
        if not read_only:
            files.make_folder(directory)
        refuse_shared(directory, model_digest(fingerprint))
        if not read_only:
            lock = _lock(directory, patience_s)
        return DiskStore(directory, fingerprint, max_bytes, lock=lock, files=files, clock=clock)
    except OSError as error:
        if lock is not None:
            lock.release()
        raise DiskCacheError(f"{directory} cannot be a cache directory: {error}") from error


def _lock(directory: Path, patience_s: float) -> DirectoryLock | None:
    try:
        return DirectoryLock(directory, patience_s)
    except OSError as error:
        logger.warning("%s cannot be written: the cache there is only read: %s", directory, error)
        return None


class DiskStore(Catalog):
    def __init__(
        self,
        directory: Path,
        fingerprint: bytes,
        max_bytes: int,
        *,
        lock: DirectoryLock | None,
        files: Files,
        clock: Callable[[], float],
    ) -> None:
        """Reads all indexes. Without a lock nothing is ever written."""
        super().__init__()
        self.fingerprint = fingerprint
        self.read_only = lock is None
        self._directory = directory
        self._directory_lock = lock
        self._clock = clock
        self._writing = Lock()
        self._paused_until = -1.0
        self._recency_due = clock() + RECENCY_S
        model = model_digest(fingerprint)
        self._log = SegmentLog(files, directory, model, max_bytes, self, read_only=self.read_only)
        self._readers = Workers("pippin-disk-read", NUM_THREADS)

    def counters(self) -> StoreCounters:
        return StoreCounters(
            entries=len(self),
            bytes=self._log.nbytes,
            max_bytes=self._log.max_bytes,
            **self.counts(),
        )

    def read(
        self, keys: Sequence[Key], into: Sequence[Destination] | None = None
    ) -> list[Loaded | None]:
        slots = self.pin(keys)
        there = [(index, slot) for index, slot in enumerate(slots) if slot is not None]
        if into is None:
            own = {slot: slot.entry.new_buffers() for _, slot in there}
            into = [() if slot is None else own[slot] for slot in slots]
        # One job for each buffer; a key that occurs twice may have the same buffer twice.
        jobs = {id(into[index]): (slot, divided(into[index])) for index, slot in there}
        try:
            blocks = [(slot, block) for slot, each in jobs.values() for block in each]
            nbytes = sum(slot.entry.nbytes for slot, _ in jobs.values())
            digests = iter(self._readers.map(_read_block, blocks, nbytes))
            read = {place: list(islice(digests, len(each))) for place, (_, each) in jobs.items()}
        finally:
            for _, slot in there:
                slot.segment.unpin()
        found: list[Loaded | None] = [None] * len(keys)
        for index, slot in there:
            parts = [digest for digest in read[id(into[index])] if digest is not None]
            if len(parts) < len(read[id(into[index])]):
                self.lose(slot, "read_errors")
            elif slot.segment.verifies(slot, parts):
                found[index] = Loaded(slot.entry, tuple(into[index]))
            else:
                self.lose_damaged(slot)
        hits = [each.entry.nbytes for each in found if each is not None]
        misses = len(found) - len(hits)
        self.count(hits=len(hits), read_bytes=sum(hits), misses=misses)
        return found

    def write(self, entry: Entry, data: Sequence[Bytes]) -> bool:
        check_sizes(entry, data)
        with self._writing:
            if entry.key in self:
                return True
            kept = False
            if not self.read_only and self._clock() >= self._paused_until:
                try:
                    kept = self._write(entry, data)
                except OSError as error:
                    logger.warning("%s cannot be written: %s", self._directory, error)
                    self._paused_until = self._clock() + PAUSE_S
            if kept:
                self.count(written=1, kept_bytes=entry.nbytes)
            else:
                self.count(write_errors=1)
            return kept

    def flush(self) -> None:
        self._flush(closes=False)

    def close(self) -> None:
        self._flush(closes=True)
        self._readers.close()
        self._log.close()
        if self._directory_lock is not None:
            self._directory_lock.release()

    def _write(self, entry: Entry, data: Sequence[Bytes]) -> bool:
        """Within the ceiling, and once more where the disk itself has no room for it."""
        self._log.note_drops()
        if not self._log.make_room(entry):
            return False
        try:
            self._log.append(entry, data)
        except OSError as error:
            if error.errno not in FULL or not self._log.give_up_segment(move=False):
                raise
            self._log.append(entry, data)
        self._save_recency_if_due()
        return True

    def _flush(self, *, closes: bool) -> None:
        with self._writing:
            if self.read_only:
                return
            try:
                self._log.note_drops()
                self._save_recency_if_due(now=closes)
                self._log.sync()
            except OSError as error:
                logger.warning("%s cannot be flushed: %s", self._directory, error)

    def _save_recency_if_due(self, *, now: bool = False) -> None:
        if now or self._clock() >= self._recency_due:
            self._recency_due = self._clock() + RECENCY_S
            try:
                self._log.save_recency()
            except OSError as error:
                logger.warning("%s: the order of use cannot be saved: %s", self._directory, error)


def _read_block(job: tuple[Slot, Block]) -> bytes | None:
    """Its digest; None where the system refused the read."""
    slot, block = job
    try:
        return slot.segment.read_block(slot, block)
    except OSError:
        return None


@dataclass
class ModelReport:
    """What is there of one model."""

    name: str  # of its folder
    segments: int
    nbytes: int
    written: float  # when its files were last changed, as time.time() says it
    entries: Counter[str] = field(default_factory=Counter)  # by component
    payload_bytes: Counter[str] = field(default_factory=Counter)  # by component
    damaged: int = 0
    foreign: int = 0
    unreadable: int = 0  # files or entries that the system did not let us read


def look(directory: Path, *, verify: bool = False) -> Iterator[ModelReport]:
    """Of each model in a directory; with `verify`, after every payload has been read."""
    if not directory.is_dir():
        raise DiskCacheError(f"{directory} is not a directory")
    for folder in model_folders(directory):
        paths = list(segment_paths(folder))
        if paths:
            nbytes = sum(map(segment_bytes, paths))
            report = ModelReport(folder.name, len(paths), nbytes, _last_change(paths))
            _add_entries(report, directory, _model_of(paths), verify=verify)
            yield report


def empty(directory: Path) -> int:
    """Remove every model's segments; returns the bytes. Raises DiskCacheError if it is in use."""
    if not directory.is_dir():
        raise DiskCacheError(f"{directory} is not a directory")
    try:
        lock = DirectoryLock(directory)
    except OSError as error:
        raise DiskCacheError(f"{directory} cannot be changed: {error}") from error
    files, freed = Files(), 0
    try:
        for folder in model_folders(directory):
            for path in segment_paths(folder):
                freed += segment_bytes(path)
                remove_segment(files, path)
            files.remove(folder / RECENCY)
            if not any(folder.iterdir()):
                folder.rmdir()
    except OSError as error:
        raise DiskCacheError(f"{directory} cannot be emptied: {error}") from error
    finally:
        lock.release()
    return freed


def _add_entries(
    report: ModelReport, directory: Path, model: bytes | None, *, verify: bool
) -> None:
    if model is None or model_folder(directory, model).name != report.name:
        report.damaged += report.segments  # not one header says whose they are
        return
    catalog = Catalog()
    log = SegmentLog(Files(), directory, model, 0, catalog, read_only=True)
    try:
        for entry in catalog.entries():
            report.entries[entry.key.component.value] += 1
            report.payload_bytes[entry.key.component.value] += entry.nbytes
            if verify:
                _verify(catalog, report, entry.key)
    finally:
        log.close()
    counts = catalog.counts()
    report.damaged += counts.get("damaged", 0)
    report.foreign += counts["foreign"] - log.num_other_segments
    report.unreadable += counts.get("read_errors", 0)


def _verify(catalog: Catalog, report: ModelReport, key: Key) -> None:
    (slot,) = catalog.pin([key])
    assert slot is not None
    try:
        report.damaged += not slot.segment.read(slot, slot.entry.new_buffers())
    except OSError:
        report.unreadable += 1
    finally:
        slot.segment.unpin()


def _model_of(paths: list[Path]) -> bytes | None:
    """The whole name of a folder's model, from the first header that is sound."""
    for path in paths:
        try:
            with open(open_regular(path, os.O_RDONLY), "rb") as file:
                header = decode_header(file.read(HEADER.size))
        except OSError:
            continue
        if header is not None and model_folder(path.parent.parent, header.model) == path.parent:
            return header.model
    return None


def _last_change(paths: list[Path]) -> float:
    return max(path.lstat().st_mtime for path in paths)
