"""One segment: a file of payloads and its index. Knows no ceiling and no order of use.

Payload first, index after: an entry exists when its record does. What a crash leaves behind the
last record is cut off when the segment is opened again. When a segment is removed, its index is
first; so a data file without an index was never finished, or was being removed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from pippin.cache.disk.directory import index_path, remove_segment
from pippin.cache.disk.files import Files, read_into
from pippin.cache.disk.segments.format import (
    DATA_MARK,
    HEADER,
    INDEX_MARK,
    VERSION,
    Drop,
    Header,
    Put,
    encode_record,
    payload_digest,
    put_of,
)
from pippin.cache.entries.blocks import Block, divided
from pippin.cache.entries.entry import Bytes, Entry, Key

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Slot:
    """Where an entry lies."""

    entry: Entry
    segment: Segment
    offset: int
    digest: bytes
    use: int  # on the store's clock; the segment keeps the sum (`Segment.use_bytes`)


class Segment:
    def __init__(
        self, files: Files, path: Path, name: bytes, model: bytes, handles: tuple[int, int]
    ) -> None:
        self.files = files
        self.path = path  # of the data file
        self.name = name
        self.model = model
        self.data_size = HEADER.size  # up to the end of the last entry
        self.index_size = HEADER.size
        self.slots: dict[Key, Slot] = {}  # those that are wanted
        self.live_bytes = 0
        self.use_bytes = 0  # sum of use x bytes over `slots`: the mean use is a division
        self.broken = False  # a write failed and could not be undone: nothing more is appended
        self._data, self._index = handles
        self._readers = 0
        self._gone = False
        self._lock = Lock()

    @classmethod
    def create(cls, files: Files, path: Path, model: bytes) -> Segment:
        name = os.urandom(16)
        data = files.create(path)
        try:
            files.write(data, 0, [Header(DATA_MARK, VERSION, name, model).encode()])
            index = files.create(index_path(path))
        except OSError:
            os.close(data)
            files.remove(path)
            raise
        segment = cls(files, path, name, model, (data, index))
        try:
            files.write(index, 0, [Header(INDEX_MARK, VERSION, name, model).encode()])
        except OSError:
            segment.remove()
            raise
        return segment

    @property
    def nbytes(self) -> int:
        """Of both files."""
        return self.data_size + self.index_size

    @property
    def mean_use(self) -> float:
        return self.use_bytes / self.live_bytes if self.live_bytes else -1.0

    def add_entry(self, slot: Slot) -> None:
        """Count an entry as wanted."""
        self.slots[slot.entry.key] = slot
        self.live_bytes += slot.entry.nbytes
        self.use_bytes += slot.use * slot.entry.nbytes

    def remove_entry(self, slot: Slot) -> None:
        del self.slots[slot.entry.key]
        self.live_bytes -= slot.entry.nbytes
        self.use_bytes -= slot.use * slot.entry.nbytes

    def used(self, slot: Slot, use: int) -> None:
        self.use_bytes += (use - slot.use) * slot.entry.nbytes
        slot.use = use

    def append(self, entry: Entry, data: Sequence[Bytes], use: int) -> Slot:
        """Write an entry at the end; an error leaves the segment as it was."""
        digest = payload_digest(self.model, entry, [block.digest() for block in divided(data)])
        slot = Slot(entry, self, self.data_size, digest, use)
        record = put_of(entry, slot.offset, digest, use)
        try:
            self.files.write(self._data, slot.offset, data)
            written = self._append_record(record)
        except OSError:
            self._undo_append()
            raise
        self.data_size += entry.nbytes
        self.index_size += written
        return slot

    def note_drops(self, offsets: Iterable[int]) -> int:
        """Write down that the entries there are not wanted; returns the bytes written."""
        before = self.index_size
        try:
            for offset in offsets:
                self.index_size += self._append_record(Drop(offset))
        except OSError:
            self._undo_append()
            raise
        return self.index_size - before

    def read(self, slot: Slot, into: Sequence[Bytes]) -> bool:
        """Fetch a payload; whether it is, to the bit, what was written. Any thread may call."""
        return self.verifies(slot, [self.read_block(slot, block) for block in divided(into)])

    def read_block(self, slot: Slot, block: Block) -> bytes:
        """Fetch a part of a payload; returns its digest, or none where the file ends before it."""
        found = read_into(self._data, self.path, slot.offset + block.at, block.parts)
        return block.digest() if found == block.nbytes else b""

    def verifies(self, slot: Slot, digests: Sequence[bytes]) -> bool:
        """Whether a payload of these blocks is what was written."""
        return payload_digest(self.model, slot.entry, digests) == slot.digest

    def rewrite_index(self, puts: Iterable[Put]) -> None:
        """An index of these records alone, in place of the one there is."""
        content = bytearray(Header(INDEX_MARK, VERSION, self.name, self.model).encode())
        for put in puts:
            content += encode_record(put, self.name, len(content))
        self.files.replace(index_path(self.path), bytes(content))
        os.close(self._index)
        self._index = self.files.open(index_path(self.path), read_only=False)
        self.index_size = len(content)

    def cut_tail(self) -> None:
        """Cut off what a crash left behind the last entry."""
        self.files.truncate(self._data, self.data_size)

    def sync(self) -> None:
        self.files.sync(self._data)
        self.files.sync(self._index)

    def pin(self) -> None:
        """The files stay open until `unpin`, also if they are removed."""
        with self._lock:
            self._readers += 1

    def unpin(self) -> None:
        with self._lock:
            self._readers -= 1
            self._close_if_idle()

    def close(self) -> None:
        with self._lock:
            self._gone = True
            self._close_if_idle()

    def remove(self) -> None:
        try:
            remove_segment(self.files, self.path)
        finally:
            self.close()

    def _append_record(self, record: Put | Drop) -> int:
        raw = encode_record(record, self.name, self.index_size)
        self.files.write(self._index, self.index_size, [raw])
        return len(raw)

    def _undo_append(self) -> None:
        try:
            self.files.truncate(self._index, self.index_size)
            self.files.truncate(self._data, self.data_size)
        except OSError:
            logger.exception("%s: a failed write could not be undone", self.path)
            self.broken = True

    def _close_if_idle(self) -> None:
        if self._gone and not self._readers and self._data >= 0:
            os.close(self._data)
            os.close(self._index)
            self._data = self._index = -1
