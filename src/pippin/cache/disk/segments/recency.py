"""In which order entries were used, as one small file. Losing it costs nothing but that order.

It is written anew as a whole, at most once a minute and when the store closes, with a number of a
few bytes for each entry. Knows no store.
"""

from __future__ import annotations

import msgspec
import xxhash

DIGEST_BYTES = 16

Uses = dict[bytes, dict[int, int]]  # by segment and offset: the store's clock at the last use

_decoder = msgspec.msgpack.Decoder(Uses)


def encode_recency(uses: Uses, model: bytes) -> bytes:
    body = msgspec.msgpack.encode(uses)
    return xxhash.xxh3_128_digest(model + body) + body


def decode_recency(raw: bytes, model: bytes) -> Uses | None:
    """None if these are not the bytes that were written."""
    digest, body = raw[:DIGEST_BYTES], raw[DIGEST_BYTES:]
    if digest != xxhash.xxh3_128_digest(model + body):
        return None
    return _decoder.decode(body)
