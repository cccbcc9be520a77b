"""Opens the segments of an earlier process: after a clean end, a crash, or damage.

unfinished   a data file without an index, or with one that has no header yet: nothing was lost
damaged      bytes that do not verify: what depends on them is dropped, the rest is kept, and the
             index is written again, so that the same damage is counted once
foreign      another model's or another version's: left alone
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pippin.cache.disk.directory import index_path
from pippin.cache.disk.files import Files, read_whole
from pippin.cache.disk.segments.format import (
    DATA_MARK,
    HEADER,
    INDEX_MARK,
    VERSION,
    BadRecords,
    Drop,
    Header,
    Put,
    decode_header,
    decode_records,
    entry_of,
)
from pippin.cache.disk.segments.segment import Segment, Slot

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
