"""Hashes of blocks of tokens, chained from the first on. Knows no tree and no request.

digest(n) = SHA-256(digest(n-1), tokens of block n)      digest(0): the salt, empty without one
"""

from __future__ import annotations

import hashlib

from pippin.cache.entries.chain import little_endian
from pippin.types import GRID

BLOCK_TOKENS = GRID  # checkpoints lie on multiples of it
BLOCK_BYTES = 4 * BLOCK_TOKENS


def block_digests(before: bytes, raw: bytes) -> list[bytes]:
    """Of the whole blocks of `raw`, int32; `before`: the digest of the block before them."""
    digests: list[bytes] = []
    digest = before
    for at in range(0, len(raw) - BLOCK_BYTES + 1, BLOCK_BYTES):
        digest = hashlib.sha256(digest + little_endian(raw[at : at + BLOCK_BYTES])).digest()
        digests.append(digest)
    return digests


def block_hash(digest: bytes) -> int:
    """As it is published: 64 bits, signed."""
    return int.from_bytes(digest[:8], "big", signed=True)


def prompt_hashes(tokens: bytes, salt: bytes) -> list[int]:
    """Of the whole blocks of a prompt, as it is submitted."""
    return [block_hash(digest) for digest in block_digests(salt, little_endian(tokens))]
