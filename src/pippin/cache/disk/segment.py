"""Segments and their indexes: their bytes, of which any that is wrong is noticed, and their files.

    data     header | payload | payload | ...     a payload is its arrays, one after the other
    index    header | record | record | ...       a record: mark, length, digest, msgpack
    header   mark (8), version, segment (16), model (32), digest (16)

Digests are XXH3 of 128 bits. A payload's covers those of its blocks (`entries.divided`), its
name, its model, and the name, dtype and shape of each array. A record's covers its place and its
segment. Bytes under another name and records that were moved or copied do not verify. Digests are
against accidents; `entries.Chain` is against prompts made to collide.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import msgspec
import xxhash

from pippin.cache.disk.directory import Files, index_path, read_into, read_whole, remove_segment
from pippin.cache.entries import (
    ArraySpec,
    Block,
    Bytes,
    Entry,
    Key,
    Place,
    divided,
    little_endian,
)
from pippin.types import Component

VERSION = 3
DATA_MARK, INDEX_MARK = b"PIPPIN-D", b"PIPPIN-I"
HEADER = struct.Struct("<8sI16s32s16s")
RECORD_MARK = b"\xf1Rec"
FRAME = struct.Struct("<4sI16s")


@dataclass(frozen=True)
class Header:
    mark: bytes
    version: int
    segment: bytes  # a random name, the same in both files
    model: bytes

    def encode(self) -> bytes:
        fields = (self.mark, self.version, self.segment, self.model)
        bare = HEADER.pack(*fields, b"")
        return HEADER.pack(*fields, xxhash.xxh3_128_digest(bare))


def decode_header(raw: bytes) -> Header | None:
    """None if these are not the bytes of any header."""
    if len(raw) < HEADER.size:
        return None
    mark, version, segment, model, _ = HEADER.unpack_from(raw)
    header = Header(mark, version, segment, model)
    return header if header.encode() == raw[: HEADER.size] else None


def model_digest(fingerprint: bytes) -> bytes:
    """A model's name in files, of this version: others' segments are other models'."""
    version = VERSION.to_bytes(4, "little")
    return hashlib.blake2b(version + fingerprint, digest_size=32, person=b"pippin model").digest()


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """An entry whose payload is complete in the data file."""

    offset: int
    digest: bytes
    chain: bytes
    component: str
    num_tokens: int
    parent: bytes
    start: int
    tokens: bytes  # int32, little-endian
    arrays: bytes  # msgpack; the same for very many entries, so it is decoded once


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """The entry at this offset is not wanted any more."""

    offset: int


_records = msgspec.msgpack.Decoder(Put | Drop)
_arrays = msgspec.msgpack.Decoder(tuple[tuple[str, str, tuple[int, ...], int | None], ...])


def encode_arrays(arrays: tuple[ArraySpec, ...]) -> bytes:
    return msgspec.msgpack.encode([(a.name, a.dtype, a.shape, a.token_axis) for a in arrays])


@lru_cache(maxsize=4096)
def decode_arrays(raw: bytes) -> tuple[ArraySpec, ...]:
    return tuple(ArraySpec(*fields) for fields in _arrays.decode(raw))


def put_of(entry: Entry, offset: int, digest: bytes) -> Put:
    key = entry.key
    return Put(
        *(offset, digest, key.chain, key.component.value, key.num_tokens, entry.parent),
        *(entry.start, little_endian(entry.tokens), encode_arrays(entry.arrays)),
    )


def entry_of(put: Put) -> Entry:
    """Raises ValueError for what no version of ours has written."""
    key = Key(put.chain, Component(put.component), put.num_tokens)
    arrays = decode_arrays(put.arrays)
    return Entry(key, put.parent, put.start, little_endian(put.tokens), arrays)


def payload_digest(model: bytes, entry: Entry, blocks: Sequence[bytes]) -> bytes:
    """Of an entry whose blocks have these digests."""
    key = entry.key
    named = (model, key.chain, key.component.value, key.num_tokens, encode_arrays(entry.arrays))
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode((named, *blocks)))


def encode_record(record: Put | Drop, segment: bytes, at: int) -> bytes:
    body = msgspec.msgpack.encode(record)
    return FRAME.pack(RECORD_MARK, len(body), _record_digest(body, segment, at)) + body


class BadRecords(NamedTuple):
    """Bytes [start, end) of an index that are no record."""

    start: int
    end: int


def decode_records(raw: bytes, segment: bytes) -> Iterator[Put | Drop | BadRecords]:
    """All records of an index file after its header. What is no record is one BadRecords."""
    at, broken = HEADER.size, -1
    while at < len(raw):
        end = _record_end(raw, segment, at)
        if end is None:
            broken = at if broken < 0 else broken
            at = raw.find(RECORD_MARK, at + 1)  # perhaps the next one is sound
            if at < 0:
                break
            continue
        if broken >= 0:
            yield BadRecords(broken, at)
            broken = -1
        yield _records.decode(memoryview(raw)[at + FRAME.size : end])
        at = end
    if broken >= 0:
        yield BadRecords(broken, len(raw))


def _record_end(raw: bytes, segment: bytes, at: int) -> int | None:
    if len(raw) - at < FRAME.size:
        return None
    mark, length, digest = FRAME.unpack_from(raw, at)
    begin = at + FRAME.size
    body = memoryview(raw)[begin : begin + length]
    if mark != RECORD_MARK or len(body) < length or digest != _record_digest(body, segment, at):
        return None
    return begin + int(length)


def _record_digest(body: bytes | memoryview, segment: bytes, at: int) -> bytes:
    digest = xxhash.xxh3_128(segment + struct.pack("<QI", at, len(body)))
    digest.update(body)
    return digest.digest()


logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Slot(Place):
    segment: Segment
    offset: int
    digest: bytes

    @property
    def end(self) -> int:
        return self.offset + self.entry.nbytes


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
        self.last_use = 0  # of any of these
        self.broken = False  # a write failed and could not be undone: nothing more is appended
        self.data, self._index = handles
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

    def add_entry(self, slot: Slot) -> None:
        """Count an entry as wanted."""
        self.slots[slot.entry.key] = slot
        self.used(slot, slot.use)

    def used(self, slot: Slot, use: int) -> None:
        slot.use = use
        self.last_use = max(self.last_use, use)

    def append(self, entry: Entry, data: Sequence[Bytes], use: int) -> Slot:
        """Write an entry at the end; an error leaves the segment as it was."""
        digest = payload_digest(self.model, entry, [block.digest() for block in divided(data)])
        slot = Slot(entry, use, self, self.data_size, digest)
        record = put_of(entry, slot.offset, digest)
        try:
            self.files.write(self.data, slot.offset, data)
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

    def read_block(self, slot: Slot, block: Block) -> bytes:
        """Fetch a part of a payload; returns its digest, or none where the file ends before it."""
        found = read_into(self.data, self.path, slot.offset + block.at, block.parts)
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

    def sync(self) -> None:
        self.files.sync(self.data)
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
            self.files.truncate(self.data, self.data_size)
        except OSError:
            logger.exception("%s: a failed write could not be undone", self.path)
            self.broken = True

    def _close_if_idle(self) -> None:
        if self._gone and not self._readers and self.data >= 0:
            os.close(self.data)
            os.close(self._index)
            self.data = self._index = -1


@dataclass
class OpenedSegment:
    """What opening a segment has shown."""

    segment: Segment | None = None
    slots: Sequence[Slot] = ()  # of its entries
    damaged: int = 0  # pieces of its files that do not verify
    foreign: int = 0


def open_segment(files: Files, path: Path, model: bytes, *, read_only: bool) -> OpenedSegment:
    """Open the segment whose data file is `path`. Raises OSError where the system does."""
    try:
        raw = read_whole(index_path(path))
    except FileNotFoundError:
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
            case BadRecords(_, end):
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
    sound = {offset: slot for offset, slot in slots.items() if slot.end <= data_size}
    if len(sound) < len(slots):
        found.damaged += 1  # the data file is shorter than it was
    found.slots = list(sound.values())
    ends = [slot.end for slot in (*sound.values(), *dropped)]
    segment.data_size = min(data_size, max(ends, default=HEADER.size))
    if not read_only:
        try:
            if found.damaged:
                segment.rewrite_index([puts[offset] for offset in sound])
            if data_size != segment.data_size:  # what a crash left behind the last entry
                segment.files.truncate(segment.data, segment.data_size)
        except OSError:
            logger.warning("%s cannot be repaired", segment.path, exc_info=True)
            segment.broken = True
    return found


def _slot(segment: Segment, put: Put) -> Slot:
    return Slot(entry_of(put), 0, segment, put.offset, put.digest)


def _is_foreign(header: Header | None, mark: bytes, model: bytes) -> bool:
    if header is None or header.mark != mark:
        return False
    return header.version != VERSION or header.model != model


def _belong_together(data: Header | None, index: Header | None) -> bool:
    if data is None or index is None:
        return False
    marks = (data.mark, index.mark) == (DATA_MARK, INDEX_MARK)
    return marks and data.segment == index.segment
