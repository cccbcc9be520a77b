"""Which entries of a log there are and in which segment each lies. Reads and writes no file."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pippin.cache.disk.directory import (
    RECENCY,
    Files,
    OtherModels,
    index_path,
    model_folder,
    read_whole,
    remove_segment,
    segment_bytes,
    segment_path,
    segment_paths,
    sort_out,
)
from pippin.cache.disk.segment import (
    DATA_MARK,
    HEADER,
    INDEX_MARK,
    VERSION,
    BadRecords,
    Drop,
    Header,
    Put,
    Segment,
    Slot,
    decode_header,
    decode_recency,
    decode_records,
    encode_arrays,
    encode_recency,
    entry_of,
)
from pippin.cache.entries.entry import Bytes, Entry, Key
from pippin.cache.entries.entry_store import EntryIndex


class Catalog(EntryIndex[Slot]):
    def __init__(self) -> None:
        super().__init__()
        self._unnoted: list[Slot] = []  # dropped, but not noted in their indexes yet

    def pin(self, keys: Sequence[Key]) -> list[Slot | None]:
        """Where entries lie; their segments stay open until each is unpinned."""
        with self._lock:
            slots = [self._places.get(key) for key in keys]
            for slot in slots:
                if slot is not None:
                    slot.segment.pin()
            return slots

    def add(self, slot: Slot) -> None:
        """An entry that is complete on disk; it replaces one of the same key."""
        with self._lock:
            before = self._places.get(slot.entry.key)
            if before is not None:
                self._drop(before)
            self._places[slot.entry.key] = slot
            slot.segment.add_entry(slot)

    def recall(self, segment: Segment, uses: dict[int, int]) -> None:
        """Uses by offset, from an earlier process."""
        with self._lock:
            for slot in segment.slots.values():
                self._set_use(slot, max(slot.use, uses.get(slot.offset, 0)))
                self.clock = max(self.clock, slot.use)

    def uses(self, segment: Segment) -> dict[int, int]:
        with self._lock:
            return {slot.offset: slot.use for slot in segment.slots.values()}

    def forget(self, keys: Iterable[Key]) -> None:
        with self._lock:
            known = list(keys)
            self._unnoted += [self._places[key] for key in known if key in self._places]
            super().forget(known)

    def lose_damaged(self, slot: Slot) -> None:
        """The index notes it too, or it would be found again."""
        if self.lose(slot, "damaged"):
            with self._lock:
                self._unnoted.append(slot)

    def take_unnoted(self) -> dict[Segment, list[int]]:
        """Offsets of dropped entries, by segment, to be noted in their indexes."""
        with self._lock:
            unnoted, self._unnoted = self._unnoted, []
        offsets: dict[Segment, list[int]] = {}
        for slot in unnoted:
            offsets.setdefault(slot.segment, []).append(slot.offset)
        return offsets

    def _set_use(self, place: Slot, use: int) -> None:
        place.segment.used(place, use)

    def _drop(self, place: Slot) -> None:
        super()._drop(place)
        place.segment.remove_entry(place)


logger = logging.getLogger(__name__)


@dataclass
class OpenedSegment:
    """What opening a segment has shown."""

    segment: Segment | None = None
    slots: Sequence[Slot] = ()  # of its entries
    damaged: int = 0  # pieces of its files that do not verify
    foreign: int = 0
    clock: int = 0  # the latest use that it knows of


def open_segment(files: Files, path: Path, model: bytes, *, read_only: bool) -> OpenedSegment:
    """Open the segment whose data file is `path`. Raises OSError where the system does."""
    raw = _content(index_path(path))
    if raw is None:
        return OpenedSegment()
    with ExitStack() as opened:
        data = files.open(path, read_only=read_only)
        opened.callback(os.close, data)
        header = decode_header(os.pread(data, HEADER.size, 0))
        data_size = os.fstat(data).st_size
        index_header = decode_header(raw)
        if _is_foreign(header, DATA_MARK, model) or _is_foreign(index_header, INDEX_MARK, model):
            return OpenedSegment(foreign=1)
        if header is not None and data_size == HEADER.size and len(raw) < HEADER.size:
            return OpenedSegment()
        if not _belong_together(header, index_header):
            return OpenedSegment(damaged=1)
        assert header is not None
        index = files.open(index_path(path), read_only=read_only)
        segment = Segment(files, path, header.segment, model, (data, index))
        opened.pop_all()  # the segment closes them
    return _recover(segment, raw, data_size, read_only=read_only)


def _recover(segment: Segment, raw: bytes, data_size: int, *, read_only: bool) -> OpenedSegment:
    found = OpenedSegment(segment)
    puts: dict[int, Put] = {}  # by offset
    dropped: list[Slot] = []  # their bytes stay: a damaged record might name them again
    for record in decode_records(raw, segment.name):
        match record:
            case BadRecords(end=end):
                being_written = read_only and end == len(raw)  # by a server that runs
                found.damaged += not being_written
            case Drop(offset) if offset in puts:
                dropped.append(_slot(segment, puts.pop(offset)))
            case Put():
                puts[record.offset] = record
            case Drop():
                pass  # of an entry whose own record was damaged
    segment.index_size = len(raw)
    slots = {offset: _slot(segment, put) for offset, put in puts.items()}
    sound = {offset: slot for offset, slot in slots.items() if _end(slot) <= data_size}
    if len(sound) < len(slots):
        found.damaged += 1  # the data file is shorter than it was
    found.slots = list(sound.values())
    found.clock = max((slot.use for slot in found.slots), default=0)
    ends = [_end(slot) for slot in (*sound.values(), *dropped)]
    segment.data_size = min(data_size, max(ends, default=HEADER.size))
    if not read_only:
        try:
            if found.damaged:
                segment.rewrite_index([puts[offset] for offset in sound])
            if data_size != segment.data_size:
                segment.cut_tail()
        except OSError:
            logger.warning("%s cannot be repaired", segment.path, exc_info=True)
            segment.broken = True
    return found


def _slot(segment: Segment, put: Put) -> Slot:
    return Slot(entry_of(put), segment, put.offset, put.digest, put.use)


def _end(slot: Slot) -> int:
    return slot.offset + slot.entry.nbytes


def _is_foreign(header: Header | None, mark: bytes, model: bytes) -> bool:
    if header is None or header.mark != mark:
        return False
    return header.version != VERSION or header.model != model


def _belong_together(data: Header | None, index: Header | None) -> bool:
    if data is None or index is None:
        return False
    marks = (data.mark, index.mark) == (DATA_MARK, INDEX_MARK)
    return marks and data.segment == index.segment


def _content(path: Path) -> bytes | None:
    try:
        return read_whole(path)
    except FileNotFoundError:
        return None


MAX_SEGMENT_BYTES = 256 << 20
MIN_SEGMENTS = 16  # of a full log: room is made in steps of a sixteenth
MOVED_SHARE = 0.05  # of the bytes that callers wrote
RECORD_BYTES = 512  # more than a record takes beside tokens and arrays


class SegmentLog:
    def __init__(
        self,
        files: Files,
        directory: Path,
        model: bytes,
        max_bytes: int,
        catalog: Catalog,
        *,
        read_only: bool,
    ) -> None:
        """Opens every segment and adds its entries to the catalog."""
        self.max_bytes = max_bytes
        self.segment_bytes = min(MAX_SEGMENT_BYTES, max_bytes // MIN_SEGMENTS)
        self._files = files
        self._model = model
        self._catalog = catalog
        self._folder = model_folder(directory, model)
        self._recency_path = self._folder / RECENCY
        self._recency_bytes = 0
        self._recency_use = 0  # the catalog's clock when it was saved
        self._kept_bytes = self._moved_bytes = 0
        self._segments: list[Segment] = []  # in the order in which they were started
        self._active: Segment | None = None
        self._number = 0  # of the newest segment
        if self._folder.exists():
            self._open(read_only=read_only)
        self._others = OtherModels(files, directory, self._folder)
        catalog.count(foreign=self._others.num_segments)

    @property
    def nbytes(self) -> int:
        """Of all files, other models' too."""
        own = sum(segment.nbytes for segment in self._segments)
        return own + self._recency_bytes + self._others.nbytes

    @property
    def num_other_segments(self) -> int:
        """Of other models, when the log was opened."""
        return self._others.num_segments

    def append(self, entry: Entry, data: Sequence[Bytes]) -> None:
        """Keep an entry at the end of the log. Raises OSError, and is then as it was."""
        self._append(entry, data, self._catalog.next_use())
        self._kept_bytes += entry.nbytes

    def make_room(self, entry: Entry) -> bool:
        """Evict what was used longest ago until an entry fits; False if it never can."""
        needed = entry.nbytes + len(entry.tokens) + len(encode_arrays(entry.arrays)) + RECORD_BYTES
        return self._make_room(needed + 2 * HEADER.size)

    def give_up_segment(self, *, move: bool = True) -> bool:
        """Delete a segment, but move its entries of later use; False if there is none."""
        sealed = [segment for segment in self._segments if segment is not self._active]
        victim = min(sealed, key=lambda segment: segment.mean_use, default=self._active)
        if victim is None:
            return False
        if victim is self._active:
            self._active = None
        if move:
            budget = int(MOVED_SHARE * self._kept_bytes) - self._moved_bytes
            self._move(self._worth_moving(victim, min(budget, self._reserve)))
        for slot in list(victim.slots.values()):
            self._catalog.lose(slot, "evicted")
        self._remove(victim)
        return True

    def note_drops(self) -> None:
        """Note dropped entries in their indexes, and delete segments that have no others."""
        for segment, offsets in self._catalog.take_unnoted().items():
            if segment in self._segments:
                self._catalog.count(written_bytes=segment.note_drops(offsets))
        for segment in list(self._segments):
            if not segment.slots and segment is not self._active:
                self._remove(segment)

    def save_recency(self) -> None:
        if self._catalog.clock == self._recency_use:
            return
        self._recency_use = self._catalog.clock
        uses = {segment.name: self._catalog.uses(segment) for segment in self._segments}
        content = encode_recency(uses, self._model)
        if self._make_room(len(content)):
            self._files.replace(self._recency_path, content)
            self._recency_bytes = len(content)
            self._catalog.count(written_bytes=len(content))

    def sync(self) -> None:
        if self._active is not None:
            self._active.sync()

    def close(self) -> None:
        for segment in self._segments:
            segment.close()

    @property
    def _reserve(self) -> int:
        """Room to move entries before their segment is deleted."""
        return self.segment_bytes // 4

    def _append(self, entry: Entry, data: Sequence[Bytes], use: int) -> None:
        segment = self._segment_for(entry.nbytes)
        before = segment.nbytes
        slot = segment.append(entry, data, use)
        self._catalog.count(written_bytes=segment.nbytes - before)
        self._catalog.add(slot)

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
        self._catalog.count(written_bytes=self._active.nbytes)
        return self._active

    def _make_room(self, needed: int) -> bool:
        ceiling = self.max_bytes - self._reserve
        if needed > ceiling:
            return False
        while self.nbytes + needed > ceiling:
            if not self._others.remove_oldest() and not self.give_up_segment():
                return False
        return True

    def _worth_moving(self, victim: Segment, max_bytes: int) -> list[Slot]:
        """The entries of a victim that are written again, within `max_bytes`."""
        total = sum(segment.live_bytes for segment in self._segments)
        average = sum(segment.use_bytes for segment in self._segments) / total if total else 0.0
        moved: list[Slot] = []
        for slot in sorted(victim.slots.values(), key=lambda slot: -slot.use):
            if slot.use <= average:
                break
            if slot.entry.nbytes <= max_bytes:
                moved.append(slot)
                max_bytes -= slot.entry.nbytes
        return moved

    def _move(self, slots: list[Slot]) -> None:
        for slot in slots:
            data = slot.entry.new_buffers()
            try:
                if not slot.segment.read(slot, data):
                    self._catalog.lose(slot, "damaged")
                    continue
                self._append(slot.entry, data, slot.use)
            except OSError:
                logger.warning("%s: entries could not be moved", slot.segment.path, exc_info=True)
                return
            self._moved_bytes += slot.entry.nbytes

    def _remove(self, segment: Segment) -> None:
        self._segments.remove(segment)
        if segment is self._active:
            self._active = None
        segment.remove()

    def _open(self, *, read_only: bool) -> None:
        foreign, lost = sort_out(self._files, self._folder, read_only=read_only)
        self._catalog.count(foreign=foreign, damaged=lost)
        for path in segment_paths(self._folder):
            self._number = max(self._number, int(path.stem))
            try:
                self._open_segment(path, read_only=read_only)
            except OSError:
                logger.warning("%s cannot be opened", path, exc_info=True)
                self._catalog.count(read_errors=1)
        self._load_recency(read_only=read_only)
        if self._segments and not read_only:
            newest = self._segments[-1]
            self._active = newest if newest.data_size < self.segment_bytes else None

    def _open_segment(self, path: Path, *, read_only: bool) -> None:
        nbytes = segment_bytes(path)
        if nbytes > self.max_bytes and not read_only:
            logger.warning("%s is removed: %d bytes are more than --disk", path, nbytes)
            remove_segment(self._files, path)
            return
        found = open_segment(self._files, path, self._model, read_only=read_only)
        self._catalog.count(damaged=found.damaged, foreign=found.foreign)
        if found.segment is not None:
            self._catalog.clock = max(self._catalog.clock, found.clock)
            self._segments.append(found.segment)
            for slot in found.slots:
                self._catalog.add(slot)
        elif not found.foreign and not read_only:
            remove_segment(self._files, path)

    def _load_recency(self, *, read_only: bool) -> None:
        try:
            raw = read_whole(self._recency_path)
        except FileNotFoundError:
            return
        except OSError:
            logger.warning("%s cannot be read", self._recency_path, exc_info=True)
            self._catalog.count(read_errors=1)
            return
        uses = decode_recency(raw, self._model)
        if uses is None:
            self._catalog.count(damaged=1)
            if not read_only:
                self._files.remove(self._recency_path)
            return
        self._recency_bytes = len(raw)
        for segment in self._segments:
            self._catalog.recall(segment, uses.get(segment.name, {}))
        self._recency_use = self._catalog.clock
