"""Detects cache entries whose content has changed. Knows no schedule; payloads stay opaque.

Beside each cached token stands a hash of the token, its position and its predecessor's hash:

    h[i] = h[i-1] * B + mix(token[i], i)   (mod 2**64)

so a node under the wrong parent, at the wrong position or over the wrong tokens shows at once.
B is odd, hence invertible: h[i] = B**i * (h[0] + sum of mix[j] * B**-j), two numpy scans, no loop.
`raise` is for debugging and also keeps a fingerprint of each payload's bytes, which waits for the
device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from time import perf_counter
from types import SimpleNamespace
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from pippin.cache.tree.components import COMPONENTS
from pippin.cache.tree.radix import Node, RadixTree, TokenArray, as_tokens
from pippin.types import Payload

logger = logging.getLogger(__name__)

Hashes = npt.NDArray[np.uint64]

SEED = 0x9E3779B97F4A7C15
BASE = 0xD1342543DE82EF95
BASE_INVERSE = pow(BASE, -1, 1 << 64)
NUM_SWEPT = 64  # nodes at a time
MAX_COUNTED = 1_000  # nodes: some milliseconds
IDLE_SHARE = 0.005  # of the time, for checks in `log` mode: what ends now is sent after the check
LEAST_POWERS = 4_096  # of a base, that are computed at once


class CacheCorruption(RuntimeError):
    """A cached entry does not match its canary."""


class Canary:
    def __init__(
        self,
        mode: Literal["off", "log", "raise"] = "raise",
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.mode = mode
        self._clock = clock
        self._idle_not_before = -math.inf
        self.checked = 0  # nodes
        self.faults = 0
        self._pending: list[Node] = []  # of the current sweep

    @property
    def deep(self) -> bool:
        """Whether payloads are fingerprinted too."""
        return self.mode == "raise"

    def mark(self, node: Node) -> None:
        """Hash the tokens of a node that was just added to the tree."""
        node.chain = chain_hashes(node.token_ids, node.start, _last_hash(node.parent))

    def seal(self, node: Node, index: int) -> None:
        """Fingerprint a payload that was just attached."""
        payload = node.payloads[index]
        node.prints[index] = payload.fingerprint() if self.deep and payload is not None else None

    def divide(self, upper: Node, lower: Node) -> None:
        """Follow a split; hashes divide with their tokens, the parts' bytes are hashed again."""
        if lower.chain is not None:
            upper.chain = lower.chain[: upper.num_tokens].copy()
            lower.chain = lower.chain[upper.num_tokens :].copy()
        for index in range(len(COMPONENTS)):
            self.seal(upper, index)
            self.seal(lower, index)

    def verify_restore(self, tokens: TokenArray, node: Node) -> bool:
        """Check the path to `node` against the tokens that it replaces."""
        expected = chain_hashes(tokens, 0, SEED)
        sound = True
        for above in node.ancestors():
            fault = self._fault(above, expected[above.start : above.end])
            sound = self._passed(above, fault) and sound
        return sound

    def sweep(self, tree: RadixTree, num_nodes: int) -> int:
        """Check the next `num_nodes` nodes, round and round the tree; returns the faults found."""
        before = self.faults
        for _ in range(num_nodes):
            if not self._pending:
                self._pending = list(tree.root.children.values())
                if not self._pending:
                    break
            node = self._pending.pop()
            if node.attached:
                self._pending.extend(node.children.values())
                expected = chain_hashes(node.token_ids, node.start, _last_hash(node.parent))
                self._passed(node, self._fault(node, expected))
        return self.faults - before

    def check_when_idle(self, tree: RadixTree, count: Callable[[], None]) -> None:
        """Sweep some nodes, and count everything if that is quick or for debugging.

        `count` raises AssertionError with what does not add up. In `log` mode a large tree is not
        counted: a request that arrives meanwhile would wait. An engine whose requests are short is
        idle hundreds of times a second: in that mode checks have a share of the time.
        """
        began = self._clock()
        if self.mode == "log" and began < self._idle_not_before:
            return
        self.sweep(tree, NUM_SWEPT)
        if self.mode == "raise" or tree.num_nodes <= MAX_COUNTED:
            try:
                count()
            except AssertionError as error:
                self.report(f"the cache does not add up: {error}")
        self._idle_not_before = began + (self._clock() - began) / IDLE_SHARE

    def self_test(self) -> None:
        """Perturb an entry in each way that matters; raises unless every one is caught."""
        tree = RadixTree()
        tokens = as_tokens(range(7, 7 + 16))
        node = tree.append(tree.root, tokens)
        self.mark(node)
        chain = node.chain
        assert chain is not None
        swapped = tokens.copy()
        swapped[[3, 4]] = swapped[[4, 3]]
        flipped = chain.copy()
        flipped[5] ^= np.uint64(1)
        expected = chain_hashes(tokens, 0, SEED)
        perturbed = {
            "tokens out of order": (chain, chain_hashes(swapped, 0, SEED)),
            "another position": (chain, chain_hashes(tokens, 64, SEED)),
            "another predecessor": (chain, chain_hashes(tokens, 0, SEED + 1)),
            "a flipped bit": (flipped, expected),
        }
        for what, (node.chain, hashes) in perturbed.items():
            self._expect(what, node, hashes, is_fault=True)
        node.chain = chain
        self._expect("a sound entry", node, expected, is_fault=False)
        if self.deep:
            content = [1]
            node.payloads[0] = cast(Payload, SimpleNamespace(fingerprint=lambda: content[0]))
            self.seal(node, 0)
            self._expect("a sound payload", node, expected, is_fault=False)
            content[0] += 1
            self._expect("changed bytes", node, expected, is_fault=True)

    def _expect(self, what: str, node: Node, expected: Hashes, *, is_fault: bool) -> None:
        if (self._fault(node, expected) is not None) != is_fault:
            result = "not noticed" if is_fault else "reported as a fault"
            raise CacheCorruption(f"canary self-test: {what}: {result}")

    def _fault(self, node: Node, expected: Hashes) -> str | None:
        if node.chain is None or len(node.chain) != len(expected):
            return "has no hash for each of its tokens"
        wrong = np.flatnonzero(node.chain != expected)
        if len(wrong):
            return f"holds another sequence from token {node.start + int(wrong[0])}"
        for index, component in enumerate(COMPONENTS):
            payload, kept = node.payloads[index], node.prints[index]
            if payload is not None and kept is not None and payload.fingerprint() != kept:
                return f"holds {component.value} bytes that have changed"
        return None

    def _passed(self, node: Node, fault: str | None) -> bool:
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


def chain_hashes(tokens: TokenArray, start: int, previous: int) -> Hashes:
    """The hash beside each token of a run that starts at position `start` after `previous`."""
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    mixed = _mix(tokens.astype(np.uint64) | positions << np.uint64(32))
    scaled = mixed * _powers(BASE_INVERSE, len(tokens))
    total = np.cumsum(scaled, dtype=np.uint64) + np.uint64(previous % (1 << 64))
    return total * _powers(BASE, len(tokens))


_POWERS: dict[int, Hashes] = {}  # by base, from the first power on


def _powers(base: int, count: int) -> Hashes:
    found = _POWERS.get(base)
    if found is None or len(found) < count:
        number = max(LEAST_POWERS, 1 << (count - 1).bit_length())
        found = np.cumprod(np.full(number, base, dtype=np.uint64), dtype=np.uint64)
        _POWERS[base] = found
    return found[:count]


def _mix(x: Hashes) -> Hashes:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _last_hash(node: Node | None) -> int:
    return SEED if node is None or node.chain is None else int(node.chain[-1])
