"""The bytes of segments and their indexes. Knows no files; any byte that is wrong is noticed.

    data     header | payload | payload | ...     a payload is its arrays, one after the other
    index    header | record | record | ...       a record: mark, length, digest, msgpack
    header   mark (8), version, segment (16), model (32), digest (16)
    recency  digest | msgpack: when each entry was used last. Written whole, at most once a minute
             and when the store closes; losing it costs nothing but that order

Digests are XXH3 of 128 bits. A payload's covers those of its blocks (`entries/blocks.py`), its
name, its model, and the name, dtype and shape of each array. A record's covers its place and its
segment. Bytes under another name and records that were moved or copied do not verify. Digests are
against accidents; `chain.py` is against prompts made to collide.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import xxhash

from pippin.cache.entries.chain import little_endian
from pippin.cache.entries.entry import ArraySpec, Entry, Key
from pippin.types import Component

VERSION = 2
DATA_MARK, INDEX_MARK = b"PIPPIN-D", b"PIPPIN-I"
HEADER = struct.Struct("<8sI16s32s16s")
RECORD_MARK = b"\xf1Rec"
FRAME = struct.Struct("<4sI16s")
DIGEST_BYTES = 16

Uses = dict[bytes, dict[int, int]]  # by segment and offset: the store's clock at the last use


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
    use: int  # on the store's clock when it was written
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


_uses = msgspec.msgpack.Decoder(Uses)
_records = msgspec.msgpack.Decoder(Put | Drop)
_arrays = msgspec.msgpack.Decoder(tuple[tuple[str, str, tuple[int, ...], int | None], ...])


def encode_arrays(arrays: tuple[ArraySpec, ...]) -> bytes:
    return msgspec.msgpack.encode([(a.name, a.dtype, a.shape, a.token_axis) for a in arrays])


@lru_cache(maxsize=4096)
def decode_arrays(raw: bytes) -> tuple[ArraySpec, ...]:
    return tuple(ArraySpec(*fields) for fields in _arrays.decode(raw))


def put_of(entry: Entry, offset: int, digest: bytes, use: int) -> Put:
    key = entry.key
    return Put(
        *(offset, digest, use, key.chain, key.component.value, key.num_tokens, entry.parent),
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


@dataclass(frozen=True)
class BadRecords:
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


def encode_recency(uses: Uses, model: bytes) -> bytes:
    body = msgspec.msgpack.encode(uses)
    return xxhash.xxh3_128_digest(model + body) + body


def decode_recency(raw: bytes, model: bytes) -> Uses | None:
    """None if these are not the bytes that were written."""
    digest, body = raw[:DIGEST_BYTES], raw[DIGEST_BYTES:]
    if digest != xxhash.xxh3_128_digest(model + body):
        return None
    return _uses.decode(body)
