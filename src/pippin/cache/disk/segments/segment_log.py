"""The segments of one model, as a log under a ceiling of bytes. One thread at a time calls.

append      at the end of the newest segment; a full one is synced and a new one started
make room   other models' segments are deleted first, then this one's, one at a time: the one whose
            bytes were, on average, used longest ago. Entries in it that were used later than the
            log's average are written again, the latest first, but no more than a twentieth of what
            callers wrote: so a disk never writes much more than it is given
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from pippin.cache.disk.directory import (
    RECENCY,
    OtherModels,
    model_folder,
    remove_segment,
    segment_bytes,
    segment_path,
    segment_paths,
    sort_out,
)
from pippin.cache.disk.files import Files, read_whole
from pippin.cache.disk.segments.catalog import Catalog
from pippin.cache.disk.segments.format import (
    HEADER,
    decode_recency,
    encode_arrays,
    encode_recency,
)
from pippin.cache.disk.segments.recovery import open_segment
from pippin.cache.disk.segments.segment import Segment, Slot
from pippin.cache.entries.entry import Bytes, Entry

logger = logging.getLogger(__name__)

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
