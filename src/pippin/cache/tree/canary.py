"""Detects cache entries whose content has changed, and counts that do not add up.

Each node keeps a hash of all tokens up to its end, in their order: a CRC-32, which no single token
changes unseen, and an Adler-32. So a node under the wrong parent, at the wrong position or over the
wrong tokens shows at once. Both go on from where they were, wherever nodes end, and each is one
call for all bytes of a node.

`raise` is for debugging and also keeps a fingerprint of each payload's bytes, which waits for the
device.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from pippin.cache.tree.components import ATTENTION, COMPONENTS, HIDDEN, STATE
from pippin.cache.tree.radix import TOKEN_BYTES, Node, RadixTree, TokenArray

if TYPE_CHECKING:
    from pippin.cache.tree.payload_tree import PayloadTree

logger = logging.getLogger(__name__)

SEED = 0x9E3779B97F4A7C15
NUM_SWEPT = 64  # nodes at a time
MAX_COUNTED = 1_000  # nodes: some milliseconds
IDLE_SHARE = 0.001  # of the time, for checks in `log` mode: what ends now is sent after the check


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

    def mark(self, node: Node) -> None:
        """Hash the tokens of a node that was just added to the tree."""
        node.path_hash = _hash_to_end(node)

    def seal(self, node: Node, index: int) -> None:
        """Fingerprint a payload that was just attached, in `raise` mode."""
        if self.deep:
            payload = node.payloads[index]
            node.prints[index] = None if payload is None else payload.fingerprint()

    def divide(self, upper: Node, lower: Node) -> None:
        """Follow a split: the lower part ends where the node did; the parts' bytes are hashed
        again. What had changed before has no hash from then on."""
        upper.path_hash = _hash_to_end(upper)
        if _hash_to_end(lower) != lower.path_hash:
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
            fault = self._fault(above, expected if end <= len(content) else None)
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


def _hash_to_end(node: Node) -> int:
    above = node.parent
    before = SEED if above is None or above.path_hash is None else above.path_hash
    return hash_on(before, node.tokens)


def hash_on(before: int, tokens: bytes) -> int:
    """The hash at the end of these tokens: an Adler-32 and a CRC-32, each gone on with."""
    return zlib.adler32(tokens, before >> 32) << 32 | zlib.crc32(tokens, before & 0xFFFFFFFF)


def check_integrity(tree: PayloadTree, locks: Iterable[tuple[Node, int]]) -> None:
    """Raise AssertionError unless links, payloads, locks, bytes and the eviction queue agree.

    It visits every node. `locks` are the nodes where live locks end, each with the floor of its
    window segment.
    """
    nodes = list(tree.radix.nodes())
    for node in nodes:
        _check_links(node)
        _check_payloads(tree, node)
    _check_flushed(tree, nodes)
    _check_queue(tree, nodes)
    _check_locks(tree, nodes, locks)
    _check_window_users(tree, nodes)
    _check_totals(tree, nodes)
    damaged = sum(node.damaged.bit_count() for node in nodes)
    assert tree.num_damaged == damaged, f"{tree.num_damaged} damaged payloads, found {damaged}"


def _check_links(node: Node) -> None:
    parent = node.parent
    assert parent is not None, f"{_name(node)} is in the tree without a parent"
    assert node.num_tokens > 0, f"{_name(node)} holds no tokens"
    first = node.key[1] if parent.is_root and isinstance(node.key, tuple) else node.key
    was_moved = node.key == (b"", node.id)  # by a node that was added after a flush
    filed = was_moved or first == int(node.token_ids[0])
    filed = filed and parent.children.get(node.key) is node
    assert filed, f"{_name(node)} is filed wrongly"
    assert node.start == parent.end, f"{_name(node)} follows a node that ends at {parent.end}"
    assert len(node.token_ids) == node.num_tokens, f"{_name(node)} has {len(node.token_ids)} tokens"


def _check_payloads(tree: PayloadTree, node: Node) -> None:
    for index, component in enumerate(COMPONENTS):
        payload = node.payloads[index]
        if payload is None:
            continue
        assert index in tree.rules.indices, f"{_name(node)} carries a stray {component.value}"
        if component.divides:
            assert payload.num_tokens == node.num_tokens, (
                f"{_name(node)}: its {component.value} covers {payload.num_tokens} tokens"
            )
    if tree.rules.has_attention:
        assert node.payloads[ATTENTION] is not None, f"{_name(node)} lacks attention KV"
    if tree.rules.has_state and node.payloads[HIDDEN] is not None:
        assert node.payloads[STATE] is not None, f"{_name(node)} keeps a hidden vector alone"
    assert node.children or node.locks or node.carries_payload, f"{_name(node)} is an empty leaf"


def _check_flushed(tree: PayloadTree, nodes: list[Node]) -> None:
    """What was flushed is not locked, has nothing newer below it, and will be freed."""
    found = set(tree._flushed)
    for node in nodes:
        assert node.parent is not None
        if node.epoch == tree.radix.epoch:
            assert node.parent not in found, f"{_name(node)} is below what was flushed"
            assert node.key != (b"", node.id), f"{_name(node)} is filed as what was flushed"
        else:
            assert not node.path_locks, f"{_name(node)} was flushed and is locked"
            assert node in found or node.parent in found, f"{_name(node)} is never freed"
            found.add(node)


def _check_queue(tree: PayloadTree, nodes: list[Node]) -> None:
    for node in nodes:
        assert tree.queue.is_queued(node), f"{_name(node)}: something of it can never be evicted"
    num_entries = sum(map(tree.queue.num_entries, nodes))
    assert len(tree.queue) == num_entries, "the queue holds nodes that are no longer in the tree"


def _check_locks(tree: PayloadTree, nodes: list[Node], locks: Iterable[tuple[Node, int]]) -> None:
    ends: Counter[Node] = Counter()
    window_locks: Counter[Node] = Counter()
    locked: set[Node] = set()
    for node, floor in locks:
        assert node.attached, f"{_name(node)} is locked but no longer in the tree"
        if not node.is_root:
            ends[node] += 1
            window_locks.update(node.back_to(floor))
            locked.update(node.ancestors())
    locked_bytes = 0
    for node in nodes:
        assert node.locks == ends[node], f"{_name(node)}: {node.locks} locks, saw {ends[node]}"
        assert node.window_locks == window_locks[node], (
            f"{_name(node)}: {node.window_locks} window locks, saw {window_locks[node]}"
        )
        path_locks = ends[node] + sum(child in locked for child in node.children.values())
        assert node.path_locks == path_locks, (
            f"{_name(node)}: {node.path_locks} path locks, saw {path_locks}"
        )
        hidden = node.locks if tree.rules.has_state else path_locks
        kept_by = (path_locks, node.window_locks, node.locks, hidden)
        for kept, payload in zip(kept_by, node.payloads, strict=True):
            locked_bytes += payload.nbytes if kept and payload is not None else 0
    assert tree.locks.nbytes == locked_bytes, (
        f"{tree.locks.nbytes} locked bytes, saw {locked_bytes}"
    )


def _check_window_users(tree: PayloadTree, nodes: list[Node]) -> None:
    users: Counter[Node] = Counter()
    if tree.rules.has_window:
        for end in filter(tree.rules.is_end, nodes):
            users.update(end.back_to(end.window_floor))
            assert end.window_floor <= max(0, end.end - tree.rules.window), (
                f"{_name(end)} looks back further than to {end.window_floor}"
            )
    for node in nodes:
        assert node.window_users == users[node], (
            f"{_name(node)}: {node.window_users} window users, saw {users[node]}"
        )


def _check_totals(tree: PayloadTree, nodes: list[Node]) -> None:
    assert tree.radix.num_nodes == len(nodes), f"{tree.radix.num_nodes} nodes, saw {len(nodes)}"
    num_tokens = sum(node.num_tokens for node in nodes)
    assert tree.radix.num_tokens == num_tokens, f"{tree.radix.num_tokens} tokens, saw {num_tokens}"
    seen: set[int] = set()
    held = dict.fromkeys(tree.rules.components, 0)
    for node in nodes:
        for component, payload in zip(COMPONENTS, node.payloads, strict=True):
            if payload is not None:
                assert id(payload) not in seen, f"{_name(node)} shares a {component.value} payload"
                seen.add(id(payload))
                held[component] += payload.nbytes
    assert tree.component_bytes == held, f"bytes {tree.component_bytes}, saw {held}"


def _name(node: Node) -> str:
    return f"node [{node.start}, {node.end})"
