"""The store of entries in a directory: a log of segments, of which the oldest are given up first.

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
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from threading import Lock

from pippin.cache.disk.directory import (
    DirectoryLock,
    Files,
    OtherModels,
    index_path,
    model_folder,
    model_folders,
    refuse_shared,
    remove_segment,
    segment_bytes,
    segment_path,
    segment_paths,
    sort_out,
)
from pippin.cache.disk.segment import (
    HEADER,
    Segment,
    Slot,
    encode_arrays,
    model_digest,
    open_segment,
)
from pippin.cache.entries import (
    Block,
    Bytes,
    Destination,
    Entry,
    EntryStore,
    Key,
    Workers,
    check_sizes,
    divided,
)
from pippin.errors import DiskCacheError

logger = logging.getLogger(__name__)

PAUSE_S = 10.0  # after a write that failed
NOTE_S = 60.0  # between two notes of use
NUM_THREADS = 8  # that read: a few copy from the page cache and hash as fast as memory allows
FULL = (errno.ENOSPC, errno.EDQUOT)
MAX_SEGMENT_BYTES = 256 << 20
MIN_SEGMENTS = 16  # of a full log: room is made in steps of a sixteenth
RECORD_BYTES = 512  # more than a record takes beside tokens and arrays


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


class DiskStore(EntryStore[Slot]):
    def __init__(
        self,
        directory: Path,
        fingerprint: bytes,
        max_bytes: int,
        *,
        lock: DirectoryLock | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
        model: bytes | None = None,
    ) -> None:
        """Reads all indexes. Without a lock nothing is ever written. `model`: the digest of the
        fingerprint, where that alone is known."""
        super().__init__(fingerprint, max_bytes)
        self.read_only = lock is None
        self.segment_bytes = min(MAX_SEGMENT_BYTES, max_bytes // MIN_SEGMENTS)
        self._directory = directory
        self._directory_lock = lock
        self._files = files or Files()
        self._clock = clock
        self._model = model or model_digest(fingerprint)
        self._folder = model_folder(directory, self._model)
        self._writing = Lock()
        self._paused_until = -1.0
        self._note_due = clock() + NOTE_S
        self._noted_use = 0  # the clock then
        self._segments: list[Segment] = []  # in the order in which they were started
        self._active: Segment | None = None
        self._number = 0  # of the newest segment
        self._unnoted: list[Slot] = []  # dropped, but not noted in their indexes yet
        if self._folder.exists():
            self._open()
        self.others = OtherModels(self._files, directory, self._folder)
        self.count(foreign=self.others.num_segments)
        self._readers = Workers("pippin-disk-read", NUM_THREADS)

    @property
    def nbytes(self) -> int:
        """Of all files, other models' too."""
        return sum(segment.nbytes for segment in self._segments) + self.others.nbytes

    def _all_counts(self) -> dict[str, int]:
        return super()._all_counts() | {"bytes": self.nbytes}

    # ---- reading ---------------------------------------------------------------------------

    def read(self, keys: Sequence[Key], into: Sequence[Destination]) -> list[bool]:
        with self._lock:
            slots = [self._places.get(key) for key in keys]
            for slot in slots:
                if slot is not None:
                    slot.segment.pin()
        there = [(n, slot, divided(into[n])) for n, slot in enumerate(slots) if slot is not None]
        try:
            blocks = [(slot, block) for _, slot, each in there for block in each]
            nbytes = sum(slot.entry.nbytes for _, slot, _ in there)
            digests = iter(self._readers.map(_read_block, blocks, nbytes))
            read = [list(islice(digests, len(each))) for *_, each in there]
        finally:
            for _, slot, _ in there:
                slot.segment.unpin()
        found = [False] * len(keys)
        for (index, slot, _), parts in zip(there, read, strict=True):
            known = [digest for digest in parts if digest is not None]
            if len(known) < len(parts):
                self.lose(slot, "read_errors")
            elif slot.segment.verifies(slot, known):
                found[index] = True
                self.count(hits=1, read_bytes=slot.entry.nbytes)
            elif self.lose(slot, "damaged"):
                with self._lock:  # the index notes it too, or it would be found again
                    self._unnoted.append(slot)
        self.count(misses=found.count(False))
        return found

    def forget(self, keys: Iterable[Key]) -> None:
        with self._lock:
            known = list(keys)
            self._unnoted += [self._places[key] for key in known if key in self._places]
            super().forget(known)

    # ---- writing ---------------------------------------------------------------------------

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
        for segment in self._segments:
            segment.close()
        if self._directory_lock is not None:
            self._directory_lock.release()

    def _write(self, entry: Entry, data: Sequence[Bytes]) -> bool:
        """Within the ceiling, and once more where the disk itself has no room for it."""
        self._note_drops()
        needed = entry.nbytes + len(entry.tokens) + len(encode_arrays(entry.arrays)) + RECORD_BYTES
        if not self._make_room(needed + 2 * HEADER.size):
            return False
        try:
            self._append(entry, data)
        except OSError as error:
            if error.errno not in FULL or not self._give_up_segment():
                raise
            self._append(entry, data)
        self._note_use_if_due()
        return True

    def _flush(self, *, closes: bool) -> None:
        with self._writing:
            if self.read_only:
                return
            try:
                self._note_drops()
                self._note_use_if_due(now=closes)
                if self._active is not None:
                    self._active.sync()
            except OSError as error:
                logger.warning("%s cannot be flushed: %s", self._directory, error)

    def _append(self, entry: Entry, data: Sequence[Bytes]) -> None:
        """Keep an entry at the end of the log. Raises OSError, and is then as it was."""
        segment = self._segment_for(entry.nbytes)
        before = segment.nbytes
        slot = segment.append(entry, data, self.next_use())
        self.count(written_bytes=segment.nbytes - before)
        self._add(slot)

    def _add(self, slot: Slot) -> None:
        """An entry that is complete on disk; it replaces one of the same key."""
        with self._lock:
            before = self._places.get(slot.entry.key)
            if before is not None:
                self._drop(before)
            self._places[slot.entry.key] = slot
            slot.segment.add_entry(slot)

    def _drop(self, place: Slot) -> None:
        super()._drop(place)
        del place.segment.slots[place.entry.key]

    def _set_use(self, place: Slot, use: int) -> None:
        place.segment.used(place, use)

    def _note_drops(self) -> None:
        """Note dropped entries in their indexes, and delete segments that have no others."""
        with self._lock:
            unnoted, self._unnoted = self._unnoted, []
        offsets: dict[Segment, list[int]] = defaultdict(list)
        for slot in unnoted:
            offsets[slot.segment].append(slot.offset)
        for segment, dropped in offsets.items():
            if segment in self._segments:
                self.count(written_bytes=segment.note_drops(dropped))
        for segment in list(self._segments):
            if not segment.slots and segment is not self._active:
                self._remove(segment)

    # ---- segments --------------------------------------------------------------------------

    def _segment_for(self, nbytes: int) -> Segment:
        active = self._active
        if active is not None and not active.broken:
            if not active.slots or active.data_size + nbytes <= self.segment_bytes:
                return active
            self._active = None
            active.sync()
        self._files.make_folder(self._folder)
        path = segment_path(self._folder, self._number + 1)
        self._active = Segment.create(self._files, path, self._model)
        self._number += 1
        self._segments.append(self._active)
        self.count(written_bytes=self._active.nbytes)
        return self._active

    def _make_room(self, needed: int) -> bool:
        """Evict what was used longest ago until so much fits; False if it never can."""
        while self.nbytes + needed > self.max_bytes:
            if needed > self.max_bytes:
                return False
            if not self.others.remove_oldest() and not self._give_up_segment():
                return False
        return True

    def _give_up_segment(self) -> bool:
        """Delete the segment that was used longest ago; False if there is none."""
        sealed = [segment for segment in self._segments if segment is not self._active]
        victim = min(sealed, key=lambda segment: segment.last_use, default=self._active)
        if victim is None:
            return False
        for slot in list(victim.slots.values()):
            self.lose(slot, "evicted")
        self._remove(victim)
        return True

    def _remove(self, segment: Segment) -> None:
        self._segments.remove(segment)
        if segment is self._active:
            self._active = None
        segment.remove()

    # ---- opening ---------------------------------------------------------------------------

    def _open(self) -> None:
        foreign, lost = sort_out(self._files, self._folder, read_only=self.read_only)
        self.count(foreign=foreign, damaged=lost)
        for path in segment_paths(self._folder):
            self._number = max(self._number, int(path.stem))
            try:
                self._open_segment(path)
            except OSError:
                logger.warning("%s cannot be opened", path, exc_info=True)
                self.count(read_errors=1)
        for segment in sorted(self._segments, key=lambda one: one.path.lstat().st_mtime):
            use = self.next_use()
            for slot in segment.slots.values():
                self._set_use(slot, use)
        self._noted_use = self.clock
        if self._segments and not self.read_only:
            newest = self._segments[-1]
            self._active = newest if newest.data_size < self.segment_bytes else None

    def _open_segment(self, path: Path) -> None:
        nbytes = segment_bytes(path)
        if nbytes > self.max_bytes and not self.read_only:
            logger.warning("%s is removed: %d bytes are more than --disk", path, nbytes)
            remove_segment(self._files, path)
            return
        found = open_segment(self._files, path, self._model, read_only=self.read_only)
        self.count(damaged=found.damaged, foreign=found.foreign)
        if found.segment is not None:
            self._segments.append(found.segment)
            for slot in found.slots:
                self._add(slot)
        elif not found.foreign and not self.read_only:
            remove_segment(self._files, path)

    def _note_use_if_due(self, *, now: bool = False) -> None:
        """A data file is as old as the last use of what is in it, so that a restart knows that."""
        if self.clock == self._noted_use or not (now or self._clock() >= self._note_due):
            return
        self._note_due, self._noted_use = self._clock() + NOTE_S, self.clock
        for age, segment in enumerate(sorted(self._segments, key=lambda one: -one.last_use)):
            self._files.set_time(segment.data, time.time() - age)


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
    written: float  # when it was last written to, as time.time() says it
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
        if not paths:
            continue
        nbytes = sum(map(segment_bytes, paths))
        changed = max(index_path(path).lstat().st_mtime for path in paths)
        report = ModelReport(folder.name, len(paths), nbytes, changed)
        store = DiskStore(directory, b"", 0, model=bytes.fromhex(folder.name))
        try:
            for entry in store.entries():
                report.entries[entry.key.component.value] += 1
                report.payload_bytes[entry.key.component.value] += entry.nbytes
                if verify:
                    store.read([entry.key], [entry.new_buffers()])  # counts what it finds
            counts = store.counters()
        finally:
            store.close()
        report.damaged = counts.damaged
        report.foreign = counts.foreign - store.others.num_segments
        report.unreadable = counts.read_errors
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
            if not any(folder.iterdir()):
                folder.rmdir()
    except OSError as error:
        raise DiskCacheError(f"{directory} cannot be emptied: {error}") from error
    finally:
        lock.release()
    return freed
