"""A radix tree over tokens.

    root ─ [5 9 2 7] ─┬─ [1 1 4]        a node holds the tokens between two forks (or checkpoints);
                      └─ [8 3] ─ [6]    children are found by their first token

Sequences of different salts share nothing, not even a first token: at the root a child is found by
the salt as well. Below that a salt costs nothing.

Tokens are kept as `bytes` (int32), so one node is compared with one memcmp: matching costs one
dictionary lookup per node, not one step per token.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pippin.cache.policy import Placement
from pippin.types import Payload

TokenArray = npt.NDArray[np.int32]
TOKEN_BYTES = 4

# By what a child is found: its first token; at the root, of a sequence with a salt, both.
ChildKey = int | tuple[bytes, int]


@dataclass(slots=True)
class Blocks:
    """The whole blocks of tokens that end in a node, as KV events last reported them."""

    digests: bytes  # 32 bytes each; they cover all tokens before the block too
    salt: bytes  # of the sequence
    first_end: int  # a prompt can be restored at the end of this block, and of those that follow
    has_window: bool
    is_live: bool = False  # at or before a point where a prompt can be restored
    num_live: int = 0  # children

    @property
    def num_blocks(self) -> int:
        return len(self.digests) // 32

    def forget(self) -> None:
        """Nothing of them was reported."""
        self.first_end, self.is_live, self.num_live = self.num_blocks, False, 0


@dataclass(slots=True, eq=False)
class Node:
    """Tokens at positions [start, end) of every sequence through here, and what is kept of them.

    A split keeps the identity of the lower part, so a lock on a node stays a lock on its end.
    """

    tokens: bytes
    start: int
    parent: Node | None  # None: the root, or a node that was removed
    id: int = 0  # never used again in this tree
    epoch: int = 0  # how often the tree was flushed; of a flushed node, before that
    end: int = field(init=False)
    key: ChildKey = 0  # its place among the parent's children
    children: dict[ChildKey, Node] = field(default_factory=dict)
    # attention, window, state, hidden
    payloads: list[Payload | None] = field(default_factory=lambda: [None] * 4)
    copied: int = 0  # bit i: the tier below has payload i too
    damaged: int = 0  # bit i: the bytes of payload i changed; it is dropped when not locked
    locks: int = 0  # that end here: the state stays
    path_locks: int = 0  # locks that end here, and locked children: attention KV stays
    window_locks: int = 0  # locks whose window reaches over this node
    window_users: int = 0  # ends, here or below, whose window reaches over this node
    window_floor: int = 0  # of an end: where the first node starts that counts it as a user
    stamp: tuple[float, int] = (0.0, 0)  # eviction level and clock tick of the last use
    state_uses: int = 0
    window_uses: int = 0
    hits: int = 0  # matches that ended here, and were locked
    placement: Placement = Placement.GRID  # why the state was placed here
    path_hash: int | None = None  # the canary's, of all tokens up to `end`
    prints: list[int | None] = field(default_factory=lambda: [None] * 4)  # of each payload's bytes
    blocks: Blocks | None = None  # None: no events, or none of this node yet

    def __post_init__(self) -> None:
        self.end = self.start + len(self.tokens) // TOKEN_BYTES

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def is_root(self) -> bool:
        return self.end == 0

    @property
    def attached(self) -> bool:
        return self.parent is not None or self.end == 0

    @property
    def nbytes(self) -> int:
        return sum(payload.nbytes for payload in self.payloads if payload is not None)

    @property
    def carries_payload(self) -> bool:
        return any(payload is not None for payload in self.payloads)

    @property
    def token_ids(self) -> TokenArray:
        return np.frombuffer(self.tokens, dtype=np.int32)

    def ancestors(self) -> Iterator[Node]:
        """This node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def back_to(self, position: int) -> Iterator[Node]:
        """This node and those above it that hold a token at or after `position`."""
        node = self
        while node.parent is not None and node.end > position:
            yield node
            node = node.parent

    def with_descendants(self) -> Iterator[Node]:
        """This node and those below it, parents before children."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def leaves_first(self) -> Iterator[Node]:
        """This node and those below it, children before parents."""
        path = [(self, iter(self.children.values()))]
        while path:
            node, children = path[-1]
            child = next(children, None)
            if child is None:
                path.pop()
                yield node
            else:
                path.append((child, iter(child.children.values())))


class RadixTree:
    """Structure only: find, fork, grow and prune."""

    def __init__(self) -> None:
        self.root = Node(b"", 0, None)
        self.num_nodes = 0
        self.num_tokens = 0
        self.epoch = 0  # how often it was flushed: a node of an older epoch is found no more
        self._last_id = 0

    def walk(self, tokens: TokenArray, salt: bytes = b"") -> tuple[list[Node], int]:
        """The nodes that share tokens with this sequence, and how many tokens they share.

        Every node but the last is shared to its end.
        """
        raw = tokens.tobytes()
        ids = memoryview(raw).cast("i")
        node, pos, path, epoch = self.root, 0, [], self.epoch
        while pos < len(ids):
            child = node.children.get((salt, ids[pos]) if salt and not pos else ids[pos])
            if child is None or child.epoch != epoch:
                break
            path.append(child)
            if not raw.startswith(child.tokens, pos * TOKEN_BYTES):
                pos += _num_shared(child.token_ids, tokens[pos : child.end])
                break
            node, pos = child, child.end
        return path, pos

    def is_flushed(self, node: Node) -> bool:
        """Whether no walk reaches a node any more."""
        return node.epoch != self.epoch

    def behind(self, node: Node, position: int, limit: int) -> TokenArray:
        """At most `limit` tokens from a position of a node on, along children used last."""
        tokens = node.token_ids[position - node.start :]
        parts, left = [tokens], limit - len(tokens)
        while left > 0:
            children = [one for one in node.children.values() if one.epoch == self.epoch]
            if not children:
                break
            node = max(children, key=lambda child: child.stamp)
            parts.append(node.token_ids)
            left -= node.num_tokens
        return np.concatenate(parts)[:limit]

    def split(self, node: Node, at: int) -> Node:
        """Put a new node over `node` that takes its first `at` tokens; returns the new one.

        Payloads stay with the lower part: dividing them is the components' business.
        """
        parent = node.parent
        assert parent is not None
        assert 0 < at < node.num_tokens
        head = node.tokens[: at * TOKEN_BYTES]
        upper = Node(head, node.start, parent, self._new_id(), node.epoch)
        upper.key = node.key
        parent.children[upper.key] = upper
        node.tokens = node.tokens[at * TOKEN_BYTES :]
        node.start = upper.end
        node.parent = upper
        node.key = _first(node.tokens)
        upper.children[node.key] = node
        self.num_nodes += 1
        return upper

    def append(self, parent: Node, tokens: TokenArray, salt: bytes = b"") -> Node:
        raw = tokens.tobytes()
        node = Node(raw, parent.end, parent, self._new_id(), self.epoch)
        node.key = (salt, _first(raw)) if salt and parent.is_root else _first(raw)
        older = parent.children.pop(node.key, None)
        if older is not None:
            assert older.epoch != self.epoch
            older.key = (b"", older.id)  # it waits to be removed where no walk looks
            parent.children[older.key] = older
        parent.children[node.key] = node
        self.num_nodes += 1
        self.num_tokens += node.num_tokens
        return node

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def remove(self, leaf: Node) -> Node:
        """Take a leaf off the tree; returns the parent it had."""
        parent = leaf.parent
        assert parent is not None
        assert not leaf.children
        del parent.children[leaf.key]
        leaf.parent = None
        self.num_nodes -= 1
        self.num_tokens -= leaf.num_tokens
        return parent

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents before children."""
        for child in list(self.root.children.values()):
            yield from child.with_descendants()


def as_tokens(tokens: npt.ArrayLike) -> TokenArray:
    return np.ascontiguousarray(tokens, dtype=np.int32)


def _first(raw: bytes) -> int:
    return int.from_bytes(raw[:TOKEN_BYTES], sys.byteorder, signed=True)


def _num_shared(a: TokenArray, b: TokenArray) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax())
    return first if differs[first] else length
