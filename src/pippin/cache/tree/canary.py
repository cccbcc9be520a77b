"""Detects cache entries whose content has changed.

Each node keeps a hash of all tokens up to its end, in their order: a CRC-32, which no single token
changes unseen, and an Adler-32. So a node under the wrong parent, at the wrong position or over the
wrong tokens shows at once. Both go on from where they were, wherever nodes end, and each is one
call for all bytes of a node.

`raise` is for debugging and also keeps a fingerprint of each payload's bytes, which waits for the
device.
"""

from __future__ import annotations

import logging
import zlib
from typing import Literal

from pippin.cache.tree.components import COMPONENTS
from pippin.cache.tree.radix import TOKEN_BYTES, Node, TokenArray

logger = logging.getLogger(__name__)

SEED = 0x9E3779B97F4A7C15


class CacheCorruption(RuntimeError):
    """A cached entry does not match its canary."""


class Canary:
    def __init__(self, mode: Literal["off", "log", "raise"] = "raise") -> None:
        self.mode = mode
        self.deep = mode == "raise"  # whether payloads are fingerprinted too
        self.checked = 0  # nodes
        self.faults = 0

    def mark(self, node: Node) -> None:
        """Hash the tokens of a node that was just added to the tree."""
        node.path_hash = hash_to_end(node)

    def seal(self, node: Node, index: int) -> None:
        """Fingerprint a payload that was just attached, in `raise` mode."""
        if self.deep:
            payload = node.payloads[index]
            node.prints[index] = None if payload is None else payload.fingerprint()

    def divide(self, upper: Node, lower: Node) -> None:
        """Follow a split: the lower part ends where the node did; the parts' bytes are hashed
        again. What had changed before has no hash from then on."""
        upper.path_hash = hash_to_end(upper)
        if hash_to_end(lower) != lower.path_hash:
            upper.path_hash = None
        for index in range(len(COMPONENTS)) if self.deep else ():
            self.seal(upper, index)
            self.seal(lower, index)

    def verify_restore(self, tokens: TokenArray, node: Node) -> bool:
        """Check the path to `node` against the tokens that it replaces."""
        content, end = tokens.tobytes(), 0
        expected, sound = SEED, True
        for above in [*node.ancestors()][::-1]:
            begin, end = end, above.end * TOKEN_BYTES
            expected = hash_on(expected, content[begin:end])
            fault = self.fault(above, expected if end <= len(content) else None)
            sound = self.passed(above, fault) and sound
        return sound

    def fault(self, node: Node, expected: int | None) -> str | None:
        if node.path_hash is None or len(node.tokens) != node.num_tokens * TOKEN_BYTES:
            return "has no hash of its tokens"
        if node.path_hash != expected:
            return "holds another sequence"
        if not self.deep:
            return None
        for index, component in enumerate(COMPONENTS):
            payload, kept = node.payloads[index], node.prints[index]
            if payload is not None and kept is not None and payload.fingerprint() != kept:
                return f"holds {component.value} bytes that have changed"
        return None

    def passed(self, node: Node, fault: str | None) -> bool:
        self.checked += 1
        if fault is None:
            return True
        self.report(f"cache entry over tokens [{node.start}, {node.end}) {fault}")
        return False

    def report(self, fault: str) -> None:
        """Count a fault, and log or raise it."""
        self.faults += 1
        if self.mode == "raise":
            raise CacheCorruption(fault)
        logger.error(fault)


def hash_to_end(node: Node) -> int:
    above = node.parent
    before = SEED if above is None or above.path_hash is None else above.path_hash
    return hash_on(before, node.tokens)


def hash_on(before: int, tokens: bytes) -> int:
    """The hash at the end of these tokens: an Adler-32 and a CRC-32, each gone on with."""
    return zlib.adler32(tokens, before >> 32) << 32 | zlib.crc32(tokens, before & 0xFFFFFFFF)
