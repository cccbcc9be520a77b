"""The whole blocks of one tree that can be restored, and what changed of them.

It is fed copies of a tree's changes and may run in another thread than the tree. A block is
BLOCK_TOKENS tokens from a multiple of BLOCK_TOKENS on; its hash covers all tokens before it too
(`block_hashes.py`). Each is hashed once, when the node in which it ends is added.

Two groups of blocks are kept:

    KV      blocks at or before a point where a prompt can be restored: without gaps from the root
    ENDS    of a model that restores at checkpoints or behind whole windows only: blocks at whose
            very end it can. Other models have no such group: every KV block is an end

So what is restored of a prompt is its longest run of KV blocks that ends with an ENDS block.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from operator import attrgetter
from typing import NamedTuple

from pippin.cache.entries.entry import little_endian
from pippin.cache.tree.components import STATE, WINDOW, Rules
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


MAX_EVENT_BLOCKS = 4096  # of one event
KV, ENDS = 0, 1
START = attrgetter("start")


class Stored(NamedTuple):
    """A run of blocks that follow each other."""

    group: int
    hashes: Sequence[int]
    parent: int | None  # the hash of the block before them
    tokens: bytes  # int32
    salt: bytes  # a digest


class Removed(NamedTuple):
    group: int
    hashes: Sequence[int]


@dataclass(slots=True, eq=False)
class Span:
    """A node of the tree, and the blocks that end in it.

    tokens above | tokens of the span        a block may begin above; the tail is what
    [    block    ][    block    ][ tail     follows the last one, from there on
    """

    id: int
    tokens: bytes
    start: int
    end: int
    parent: Span | None
    salt: bytes
    held: int  # bit i: payload i
    hashes: list[int]  # of its blocks
    digest: bytes  # of the last block that ends here or above; the salt, if none does
    tail: bytes
    first_end: int  # its blocks from this one on are in group ENDS, as was last reported
    is_live: bool = False  # its blocks are in group KV, as was last reported
    num_live: int = 0  # children
    children: set[Span] = field(default_factory=set)

    def above(self) -> Iterator[Span]:
        """Those above it, without the root."""
        span = self.parent
        while span is not None and span.parent is not None:
            yield span
            span = span.parent


class Run:
    """Blocks of one group that follow each other, and where the last one ends."""

    __slots__ = ("hashes", "parent", "salt", "tokens")

    def __init__(self, parent: int | None, salt: bytes) -> None:
        self.hashes: list[int] = []
        self.tokens: list[bytes] = []
        self.parent = parent
        self.salt = salt

    def events(self, group: int) -> Iterator[Stored]:
        tokens, parent = b"".join(self.tokens), self.parent
        if len(self.hashes) <= MAX_EVENT_BLOCKS:
            yield Stored(group, self.hashes, parent, tokens, self.salt)
            return
        for at in range(0, len(self.hashes), MAX_EVENT_BLOCKS):
            hashes = self.hashes[at : at + MAX_EVENT_BLOCKS]
            part = tokens[at * BLOCK_BYTES : (at + len(hashes)) * BLOCK_BYTES]
            yield Stored(group, hashes, parent, part, self.salt)
            parent = hashes[-1]


class BlockIndex:
    def __init__(self, rules: Rules) -> None:
        self._has_state = rules.has_state
        self._window = rules.window if rules.has_window else 0
        self.has_ends = rules.has_state or rules.has_window
        self._root = Span(0, b"", 0, 0, None, b"", 0, [], b"", b"", 0)
        self._spans = {0: self._root}
        self._dirty: dict[Span, None] = {}
        # Since the last report: blocks [first, stop) of spans, children before parents; hashes.
        self._stored: tuple[list[tuple[Span, int, int]], ...] = ([], [])
        self._removed: tuple[dict[int, None], ...] = ({}, {})
        self.num_blocks = 0  # in group KV

    # ---- changes of the tree; those of nodes below one that was not added are ignored -----------

    def added(self, id: int, parent_id: int, tokens: bytes, salt: bytes, held: int) -> None:
        parent = self._spans.get(parent_id)
        if parent is None:
            return
        hashes, digest, tail = hash_blocks(salt or parent.digest, parent.tail + tokens)
        end, count = parent.end + len(tokens) // 4, len(hashes)
        salt = salt or parent.salt
        span = Span(id, tokens, parent.end, end, parent, salt, held, hashes, digest, tail, count)
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
        head, lower.tokens = lower.tokens[: 4 * count], lower.tokens[4 * count :]
        before = parent.digest if parent.end >= BLOCK_TOKENS else lower.salt
        hashes, digest, tail = hash_blocks(before, parent.tail + head)
        at, end = len(hashes), lower.start + count
        first_end = min(lower.first_end, at)
        upper = Span(
            upper_id, head, lower.start, end, parent, lower.salt, helds[0], hashes, digest, tail,
            first_end, lower.is_live, int(lower.is_live), {lower},
        )  # fmt: skip
        parent.children.remove(lower)
        parent.children.add(upper)
        lower.start, lower.parent, lower.held = end, upper, helds[1]
        lower.hashes = lower.hashes[at:]
        lower.first_end = max(lower.first_end - at, 0)
        self._spans[upper_id] = upper
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
        self._removed[ENDS].update(dict.fromkeys(span.hashes[span.first_end :]))
        if span.is_live:
            self._removed[KV].update(dict.fromkeys(span.hashes))
            self.num_blocks -= len(span.hashes)
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
        runs = [self._runs(group) for group in (KV, ENDS)]  # cancels what was removed and stored
        changes: list[Stored | Removed] = []
        for group, removed in enumerate(self._removed):
            hashes = list(removed)
            starts = range(0, len(hashes), MAX_EVENT_BLOCKS)
            changes += [Removed(group, hashes[at : at + MAX_EVENT_BLOCKS]) for at in starts]
        for group in (KV, ENDS):
            for run in runs[group]:
                changes += run.events(group)
        self._stored, self._removed = ([], []), ({}, {})
        return changes

    def _settle(self) -> None:
        """Children before parents: whether a block is stored depends on what is below it."""
        dirty = self._dirty
        dirty.pop(self._root, None)
        order = sorted(dirty, key=START)
        while order:
            span = order.pop()
            del dirty[span]
            count = len(span.hashes)
            first = self._first_end(span, count)
            if self.has_ends and first != span.first_end:
                if first < span.first_end:
                    self._stored[ENDS].append((span, first, span.first_end))
                else:
                    self._removed[ENDS].update(dict.fromkeys(span.hashes[span.first_end : first]))
                span.first_end = first
            is_live = span.num_live > 0 or first < count
            if is_live == span.is_live:
                continue
            span.is_live = is_live
            if is_live:
                self._stored[KV].append((span, 0, count))
            else:
                self._removed[KV].update(dict.fromkeys(span.hashes))
            self.num_blocks += count if is_live else -count
            parent = span.parent
            assert parent is not None
            parent.num_live += 1 if is_live else -1
            only_one = parent.num_live == (1 if is_live else 0)
            if only_one and parent not in dirty and parent is not self._root:
                dirty[parent] = None
                insort(order, parent, key=START)

    def _first_end(self, span: Span, count: int) -> int:
        """The first of a span's blocks at whose end a prompt can be restored, as behind all that
        follow; `count` if there is none.

        The rule of `Rules.deepest_valid`, for all of its positions at once.
        """
        first = 0
        if self._has_state:
            if not span.held >> STATE & 1 or span.end % BLOCK_TOKENS:
                return count
            first = count - 1
        if self._window:
            if not span.held >> WINDOW & 1:
                return count
            for above in span.above():
                if above.end + self._window <= span.start:
                    break
                if not above.held >> WINDOW & 1:  # no window may reach back to it
                    least = -(-(above.end + self._window) // BLOCK_TOKENS)
                    first = max(first, least - span.start // BLOCK_TOKENS - 1)
                    break
        return min(first, count)

    def _runs(self, group: int) -> list[Run]:
        """What is stored now, parents first. What was removed as well only moved to another node,
        and is neither."""
        removed = self._removed[group]
        runs: list[Run] = []
        open_runs: dict[Span, Run] = {}  # by the span with whose last block one ends
        for span, first, stop in reversed(self._stored[group]):
            hashes, above = span.hashes, span.parent
            assert above is not None
            run = None if first else open_runs.pop(above, None)
            if not hashes:  # a block passes through
                if run is not None:
                    open_runs[span] = run
                continue
            tokens = above.tail + span.tokens if above.tail else span.tokens
            parts: Sequence[tuple[int, int]] = ((first, stop),)
            if removed and not removed.keys().isdisjoint(hashes[first:stop]):
                parts = [(at, at + 1) for at in range(first, stop) if hashes[at] not in removed]
                for hash in hashes[first:stop]:
                    removed.pop(hash, None)
            last = first
            for begin, end in parts:
                if run is None or begin != last:
                    run = Run(_hash_before(span, begin), span.salt)
                    runs.append(run)
                run.hashes += hashes[begin:end]
                run.tokens.append(tokens[begin * BLOCK_BYTES : end * BLOCK_BYTES])
                last = end
            if run is not None and last == len(hashes):
                open_runs[span] = run
        return runs


def _hash_before(span: Span, first: int) -> int | None:
    """Of the block before a span's block `first`."""
    if first:
        return span.hashes[first - 1]
    above = span.parent
    assert above is not None
    return block_hash(above.digest) if above.end >= BLOCK_TOKENS else None
