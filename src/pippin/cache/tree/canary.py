"""Detects cache entries whose content has changed. Knows no schedule; payloads stay opaque.

Each node keeps a hash of all tokens up to its end, at their positions:

    h(end) = h(start) + sum of token[i] * weight[i]   (mod 2**64)

so a node under the wrong parent, at the wrong position or over the wrong tokens shows at once.
Weights are odd, so no single token changes unseen. A sum does not know where nodes end: a split
needs that of its lower part alone, and a prompt is hashed once for all nodes that replace it.
`raise` is for debugging and also keeps a fingerprint of each payload's bytes, which waits for the
device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from types import SimpleNamespace
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from pippin.cache.tree.components import COMPONENTS
from pippin.cache.tree.radix import TOKEN_BYTES, Node, RadixTree, TokenArray, as_tokens
from pippin.types import Payload

logger = logging.getLogger(__name__)

Hashes = npt.NDArray[np.uint64]

SEED = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
NUM_SWEPT = 64  # nodes at a time
MAX_COUNTED = 1_000  # nodes: some milliseconds
IDLE_SHARE = 0.001  # of the time, for checks in `log` mode: what ends now is sent after the check
LEAST_WEIGHTS = 4_096  # that are computed at once


class CacheCorruption(RuntimeError):
    """A cached entry does not match its canary."""


class Canary:
    def __init__(
        self,
        mode: Literal["off", "log", "raise"] = "raise",
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.mode = mode
        self.deep = mode == "raise"  # whether payloads are fingerprinted too
        self._clock = clock
        self._idle_not_before = -math.inf
        self.checked = 0  # nodes
        self.faults = 0
        self._pending: list[Node] = []  # of the current sweep

    def mark(self, added: Sequence[Node], tokens: TokenArray) -> None:
        """Hash nodes that were just added to the tree, each below the one before it: they end
        along these tokens."""
        for node, found in zip(added, _hashes_along(tokens, added), strict=True):
            node.path_hash = found

    def seal(self, node: Node, index: int) -> None:
        """Fingerprint a payload that was just attached."""
        if self.deep:
            payload = node.payloads[index]
            node.prints[index] = None if payload is None else payload.fingerprint()

    def divide(self, upper: Node, lower: Node) -> None:
        """Follow a split: the lower part ends where the node did; the parts' bytes are hashed
        again. The upper part's hash is what the kept one says, not what its tokens are now."""
        if lower.path_hash is not None:
            upper.path_hash = lower.path_hash - hash_tokens(lower.token_ids, lower.start) & MASK
        for index in range(len(COMPONENTS)) if self.deep else ():
            self.seal(upper, index)
            self.seal(lower, index)

    def verify_restore(self, tokens: TokenArray, node: Node) -> bool:
        """Check the path to `node` against the tokens that it replaces."""
        path = [*node.ancestors()][::-1]
        sound = True
        for above, expected in zip(path, _hashes_along(tokens, path), strict=True):
            sound = self._passed(above, self._fault(above, expected)) and sound
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
                self._passed(node, self._fault(node, _hash_to_end(node)))
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
        self.mark([node], tokens)
        kept = node.path_hash
        assert kept is not None
        swapped = tokens.copy()
        swapped[[3, 4]] = swapped[[4, 3]]
        expected = _after(SEED, hash_tokens(tokens, 0))
        perturbed = {
            "tokens out of order": (kept, _after(SEED, hash_tokens(swapped, 0))),
            "another position": (kept, _after(SEED, hash_tokens(tokens, 64))),
            "another predecessor": (kept, _after(SEED + 1, hash_tokens(tokens, 0))),
            "a flipped bit": (kept ^ 1, expected),
        }
        for what, (node.path_hash, found) in perturbed.items():
            self._expect(what, node, found, is_fault=True)
        node.path_hash = kept
        self._expect("a sound entry", node, expected, is_fault=False)
        if self.deep:
            content = [1]
            node.payloads[0] = cast(Payload, SimpleNamespace(fingerprint=lambda: content[0]))
            self.seal(node, 0)
            self._expect("a sound payload", node, expected, is_fault=False)
            content[0] += 1
            self._expect("changed bytes", node, expected, is_fault=True)

    def _expect(self, what: str, node: Node, expected: int | None, *, is_fault: bool) -> None:
        if (self._fault(node, expected) is not None) != is_fault:
            result = "not noticed" if is_fault else "reported as a fault"
            raise CacheCorruption(f"canary self-test: {what}: {result}")

    def _fault(self, node: Node, expected: int | None) -> str | None:
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


def hash_tokens(tokens: TokenArray, start: int) -> int:
    """What a run of tokens from position `start` on adds to the hash before it."""
    return int(np.dot(tokens.astype(np.uint64), _weights(start + len(tokens))[start:]))


def _hash_to_end(node: Node) -> int:
    return _after(_hash_before(node), hash_tokens(node.token_ids, node.start))


def _hash_before(node: Node) -> int:
    above = node.parent
    return SEED if above is None or above.path_hash is None else above.path_hash


def _hashes_along(tokens: TokenArray, path: Sequence[Node]) -> Iterator[int | None]:
    """Of a sequence, the hash at the end of each node; None: it does not reach it.

    By `np.dot`, which adds integers up one by one: for the few tokens of a node that takes less
    time than the wide registers of a processor to warm up.
    """
    if not path:
        return
    above, found = path[0].parent, _hash_before(path[0])
    assert above is not None
    start = above.end
    added, weights = tokens[start:].astype(np.uint64), _weights(len(tokens))[start:]
    first = 0
    for node in path:
        end = node.end - start
        if not first < end <= len(added):
            yield None
            continue
        found = _after(found, int(np.dot(added[first:end], weights[first:end])))
        yield found
        first = end


def _after(before: int, added: int) -> int:
    return before + added & MASK


_known_weights: Hashes = np.zeros(0, dtype=np.uint64)


def _weights(count: int) -> Hashes:
    """Of the positions [0, count): odd."""
    global _known_weights
    if len(_known_weights) < count:
        number = max(LEAST_WEIGHTS, 1 << (count - 1).bit_length())
        _known_weights = _mix(np.arange(1, number + 1, dtype=np.uint64)) | np.uint64(1)
    return _known_weights[:count]


def _mix(x: Hashes) -> Hashes:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
