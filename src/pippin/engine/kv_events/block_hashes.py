"""Hashes of blocks of tokens, chained from the first on. Knows no tree and no request.

digest(n) = SHA-256(digest(n-1), tokens of block n)      digest(0): the salt, empty without one
"""

from __future__ import annotations

from hashlib import sha256

from pippin.cache.entries.chain import little_endian
from pippin.types import GRID

BLOCK_TOKENS = GRID  # checkpoints lie on multiples of it
BLOCK_BYTES = 4 * BLOCK_TOKENS


def hash_blocks(before: bytes, raw: bytes) -> tuple[list[int], bytes, bytes]:
    """Of the whole blocks of `raw`, int32: their hashes, the last one's digest, and what follows
    it. `before`: the digest of the block before them."""
    hashes: list[int] = []
    digest, data = before, little_endian(raw)
    stop = len(raw) - len(raw) % BLOCK_BYTES
    for at in range(0, stop, BLOCK_BYTES):
        digest = sha256(digest + data[at : at + BLOCK_BYTES]).digest()
        hashes.append(block_hash(digest))
    return hashes, digest, raw[stop:]


def block_hash(digest: bytes) -> int:
    """As it is published: 64 bits, signed."""
    return int.from_bytes(digest[:8], "big", signed=True)


def prompt_hashes(tokens: bytes, salt: bytes) -> list[int]:
    """Of the whole blocks of a prompt, as it is submitted."""
    return hash_blocks(salt, little_endian(tokens))[0]
