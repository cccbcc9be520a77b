"""Names for sequences of tokens, of one model. Knows no entries and no files.

    key(p) = BLAKE2b(root, token 0 ... token p-1)        root: the model's fingerprint, or
    root   = BLAKE2b(model fingerprint, key = salt)            this, of sequences with a salt

So a key says all that a payload at position `p` was computed from. It does not depend on where
nodes of a tree begin and end: a path that was split later has the same keys. BLAKE2b is collision
resistant: no prompt can be written to have the key of another.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import numpy.typing as npt

KEY_BYTES = 32


class Chain:
    """All tokens from the root to one position, hashed so far; about 400 bytes.

    A value: `extended` makes another. It costs the hash of the new tokens alone, at about a
    gigabyte a second, so a node that keeps its chain names what hangs below it cheaply.
    """

    __slots__ = ("_hash", "key", "length")

    def __init__(self, fingerprint: bytes, salt: bytes = b"") -> None:
        """The root, for a model of this fingerprint (`fingerprint.py`) and a salt's digest."""
        self.length = 0
        self._hash = hashlib.blake2b(fingerprint, digest_size=KEY_BYTES, person=b"pippin chain 1")
        self.key = self._hash.digest()
        if salt:
            salted = hashlib.blake2b(
                fingerprint, key=salt, digest_size=KEY_BYTES, person=b"pippin salt 1"
            )
            self.key = salted.digest()
            self._hash = _hash_below(self.key)

    @classmethod
    def of_root(cls, key: bytes) -> Chain:
        """A root that some salt led to, of its key alone: entries name it, a salt is never kept."""
        chain = cls.__new__(cls)
        chain.length, chain.key, chain._hash = 0, key, _hash_below(key)
        return chain

    def extended(self, tokens: npt.NDArray[np.int32] | bytes) -> Chain:
        """The chain after these tokens too (int32, or their bytes as a tree node keeps them)."""
        raw = tokens if isinstance(tokens, bytes) else tokens.astype(np.int32).tobytes()
        chain = Chain.__new__(Chain)
        chain._hash = self._hash.copy()
        chain._hash.update(little_endian(raw))
        chain.key = chain._hash.digest()
        chain.length = self.length + len(raw) // 4
        return chain


def _hash_below(root: bytes) -> hashlib.blake2b:
    """Of sequences with a salt."""
    return hashlib.blake2b(root, digest_size=KEY_BYTES, person=b"pippin chain 2")


def little_endian(raw: bytes) -> bytes:
    """int32 tokens of this machine's order as they are written to files, or back."""
    if sys.byteorder == "little":
        return raw
    return np.frombuffer(raw, dtype=np.int32).byteswap().tobytes()
