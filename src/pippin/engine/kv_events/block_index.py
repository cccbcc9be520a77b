"""The whole blocks of one tree that can be restored, and what changed of them. Knows no sockets.

It is fed copies of a tree's changes and may run in another thread than the tree. A block is
BLOCK_TOKENS tokens from a multiple of BLOCK_TOKENS on; its hash covers all tokens before it too
(`block_hashes.py`).

Two groups of blocks are kept:

    KV      blocks at or before a point where a prompt can be restored: without gaps from the root
    ENDS    of a model that restores at checkpoints or behind whole windows only: blocks at whose
            very end it can. Other models have no such group: every KV block is an end

So what is restored of a prompt is its longest run of KV blocks that ends with an ENDS block.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

import numpy as np

from pippin.cache.tree.components import STATE, WINDOW, Rules
from pippin.engine.kv_events.block_hashes import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    block_digests,
    block_hash,
)

MAX_EVENT_BLOCKS = 4096  # of one event
KV, ENDS = 0, 1

Block = TypeVar("Block")


@dataclass(frozen=True)
class Stored:
    """A run of blocks that follow each other."""

    group: int
    hashes: Sequence[int]
    parent: int | None  # the hash of the block before them
    tokens: list[int]
    salt: bytes  # a digest


@dataclass(frozen=True)
class Removed:
    group: int
    hashes: Sequence[int]


@dataclass(slots=True, eq=False)
class Span:
    """A node of the tree."""

    id: int
    tokens: bytes
    start: int
    parent: Span | None
    salt: bytes = b""
    held: int = 0  # bit i: payload i
    children: set[Span] = field(default_factory=set)
    digests: list[bytes] | None = None  # of the blocks that end in it; None: not computed yet
    num_stored: int = 0  # of these, in group KV
    ends: set[int] = field(default_factory=set)  # indices of these, in group ENDS
    is_live: bool = False  # a prompt can be restored up to the end of a block here or below
    num_live: int = 0  # children

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // 4

    def first_tokens(self, count: int) -> bytes:
        return self.tokens[: 4 * count]

    def above(self) -> Iterator[Span]:
        """Those above it, without the root."""
        span = self.parent
        while span is not None and span.parent is not None:
            yield span
            span = span.parent


Place = tuple[Span, int]  # a block: its index among those that end in a span


class BlockIndex:
    def __init__(self, rules: Rules) -> None:
        self._has_state = rules.has_state
        self._window = rules.window if rules.has_window else 0
        self.has_ends = rules.has_state or rules.has_window
        self._root = Span(0, b"", 0, None)
        self._spans = {0: self._root}
        self._dirty: dict[Span, None] = {}
        self._stored: dict[tuple[int, bytes], Place] = {}
        self._removed: dict[tuple[int, bytes], None] = {}
        self.num_blocks = 0  # in group KV

    # ---- changes of the tree; those of nodes below one that was not added are ignored -----------

    def added(self, id: int, parent_id: int, tokens: bytes, salt: bytes, held: int) -> None:
        parent = self._spans.get(parent_id)
        if parent is None:
            return
        span = Span(id, tokens, parent.end, parent, salt or parent.salt, held)
        parent.children.add(span)
        self._spans[id] = span
        self._dirty[span] = None

    def split(self, upper_id: int, lower_id: int, count: int, helds: tuple[int, int]) -> None:
        """The first `count` tokens of a node are another one now; `helds`: of both."""
        lower = self._spans.get(lower_id)
        if lower is None:
            return
        parent = lower.parent
        assert parent is not None
        head = lower.first_tokens(count)
        upper = Span(upper_id, head, lower.start, parent, lower.salt, helds[0], {lower})
        upper.is_live, upper.num_live = lower.is_live, int(lower.is_live)
        parent.children.remove(lower)
        parent.children.add(upper)
        lower.tokens, lower.start = lower.tokens[4 * count :], upper.end
        lower.parent, lower.held = upper, helds[1]
        self._spans[upper_id] = upper
        if lower.digests is not None:
            at = upper.end // BLOCK_TOKENS - upper.start // BLOCK_TOKENS
            upper.digests, lower.digests = lower.digests[:at], lower.digests[at:]
            upper.num_stored = min(lower.num_stored, at)
            lower.num_stored -= upper.num_stored
            upper.ends = {index for index in lower.ends if index < at}
            lower.ends = {index - at for index in lower.ends if index >= at}
        self._dirty[upper] = self._dirty[lower] = None

    def changed(self, id: int, held: int) -> None:
        span = self._spans.get(id)
        if span is None or span.held == held:
            return
        had, span.held = span.held, held
        self._dirty[span] = None
        if self._window and (had ^ held) >> WINDOW & 1:
            near = [span]
            while near:  # windows of these may reach back to it
                below = near.pop()
                self._dirty[below] = None
                reached = span.end + self._window
                near += [child for child in below.children if child.start < reached]

    def removed(self, id: int) -> None:
        span = self._spans.pop(id, None)
        if span is None:
            return
        parent = span.parent
        assert parent is not None
        parent.children.remove(span)
        self._dirty.pop(span, None)
        self._store(span, num_stored=0, ends=set())
        if span.is_live:
            parent.num_live -= 1
            self._dirty[parent] = None

    def flushed(self, ids: Sequence[int]) -> None:
        """These and all below them; that they are removed, one by one, is ignored later."""
        below = [self._spans[id] for id in ids if id in self._spans]
        for span in below:
            below.extend(span.children)
        for span in reversed(below):
            self.removed(span.id)

    # ---- changes of the blocks ----------------------------------------------------------------

    def take_changes(self) -> list[Stored | Removed]:
        """Since the last call: what was removed, then what was stored, parents first."""
        self._settle()
        unchanged = self._stored.keys() & self._removed.keys()  # moved to another node
        removed = [key for key in self._removed if key not in unchanged]
        stored = [(key[0], place) for key, place in self._stored.items() if key not in unchanged]
        self._removed, self._stored = {}, {}
        changes: list[Stored | Removed] = []
        for group in (KV, ENDS):
            hashes = [block_hash(digest) for kind, digest in removed if kind == group]
            changes += [Removed(group, some) for some in _parts(hashes)]
        for group in (KV, ENDS):
            places = [place for kind, place in stored if kind == group]
            places.sort(key=lambda place: (place[0].start, id(place[0]), place[1]))
            # Blocks of a run differ from their place in the list by the same number.
            runs = groupby(enumerate(places), lambda one: (id(one[1][0]), one[1][1] - one[0]))
            for _, run in runs:
                blocks = [place for _, place in run]
                changes += [self._event(group, some) for some in _parts(blocks)]
        return changes

    def _settle(self) -> None:
        """Children before parents: whether a block is stored depends on what is below it."""
        order = [(-span.start, number, span) for number, span in enumerate(self._dirty)]
        heapq.heapify(order)
        number = len(order)
        while order:
            span = heapq.heappop(order)[2]
            if span not in self._dirty or span.parent is None:
                continue
            del self._dirty[span]
            digests = self._digests(span)
            ends = self._restorable(span)
            last = max(ends, default=-1)
            num_stored = len(digests) if span.num_live else last + 1
            self._store(span, num_stored, ends if self.has_ends else set())
            is_live = num_stored > 0 or span.num_live > 0
            if is_live != span.is_live:
                span.is_live = is_live
                span.parent.num_live += 1 if is_live else -1
                number += 1
                self._dirty[span.parent] = None
                heapq.heappush(order, (-span.parent.start, number, span.parent))
        self._dirty.clear()

    def _store(self, span: Span, num_stored: int, ends: set[int]) -> None:
        digests = span.digests or []
        had, span.num_stored = span.num_stored, num_stored
        for index in range(had, num_stored):
            self._stored[KV, digests[index]] = (span, index)
        for index in range(num_stored, had):
            self._removed[KV, digests[index]] = None
        for index in sorted(ends - span.ends):
            self._stored[ENDS, digests[index]] = (span, index)
        for index in sorted(span.ends - ends):
            self._removed[ENDS, digests[index]] = None
        span.ends = ends
        self.num_blocks += num_stored - had

    def _restorable(self, span: Span) -> set[int]:
        """Of the blocks that end in a span, those at whose end a prompt can be restored.

        The rule of `Rules.deepest_valid`, for all of its positions at once.
        """
        count = span.end // BLOCK_TOKENS - span.start // BLOCK_TOKENS
        first = 0
        if self._has_state:
            if not span.held >> STATE & 1 or span.end % BLOCK_TOKENS:
                return set()
            first = count - 1
        if self._window:
            if not span.held >> WINDOW & 1:
                return set()
            hole = next((one for one in span.above() if not one.held >> WINDOW & 1), None)
            if hole is not None:  # no window may reach back to it
                least = -(-(hole.end + self._window) // BLOCK_TOKENS)
                first = max(first, least - span.start // BLOCK_TOKENS - 1)
        return set(range(first, count))

    # ---- hashes -------------------------------------------------------------------------------

    def _digests(self, span: Span) -> list[bytes]:
        missing = [span] if span.digests is None else []
        missing += [one for one in span.above() if one.digests is None] if missing else []
        for one in reversed(missing):
            raw = self._tokens_from(one, one.start - one.start % BLOCK_TOKENS)
            digest = next((above.digests[-1] for above in one.above() if above.digests), one.salt)
            one.digests = block_digests(digest, raw)
        assert span.digests is not None
        return span.digests

    def _tokens_from(self, span: Span, position: int) -> bytes:
        """Up to the end of a span, from a position in it or above it on."""
        parts, start = [span.tokens], span.start
        for above in span.above():
            if start <= position:
                break
            parts.append(above.tokens)
            start = above.start
        return b"".join(reversed(parts))[4 * (position - start) :]

    def _event(self, group: int, blocks: Sequence[Place]) -> Stored:
        span, first = blocks[0]
        assert span.digests is not None
        before = span.start // BLOCK_TOKENS + first  # blocks
        if first:
            parent: bytes | None = span.digests[first - 1]
        else:
            parent = next((one.digests[-1] for one in span.above() if one.digests), None)
        raw = self._tokens_from(span, before * BLOCK_TOKENS)[: len(blocks) * BLOCK_BYTES]
        return Stored(
            group,
            [block_hash(span.digests[index]) for _, index in blocks],
            None if parent is None else block_hash(parent),
            np.frombuffer(raw, dtype=np.int32).tolist(),
            span.salt,
        )


def _parts(blocks: Sequence[Block]) -> list[Sequence[Block]]:
    """Of one event each."""
    starts = range(0, len(blocks), MAX_EVENT_BLOCKS)
    return [blocks[at : at + MAX_EVENT_BLOCKS] for at in starts]
