"""The tree of what a tier below memory has: the rules of the one in memory, over parts of entries.

It evicts nothing. The store keeps within its bytes and reports what it evicted. That and all below
it leaves the tree as soon as it is not locked, a bounded number of nodes in each step
(`remove_lost`). Until then `CacheTier.find` knows that it is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

import numpy as np

from pippin.cache.entries import ArraySpec, Bytes, Chain, Entry, EntryStore, Key, Loaded, rebuild
from pippin.cache.prefix_cache import Match, PrefixCache
from pippin.cache.tree.canary import Canary
from pippin.cache.tree.payload_tree import TreeObserver
from pippin.cache.tree.radix import Node, TokenArray
from pippin.types import Component, Payload, TierName

FORGETTING = 0.25  # the weight of the last load
MIN_BYTES = 1 << 20  # fewer say nothing about a rate
HOPE = 1.02  # for each load that was declined, a tier is taken for a little faster


@dataclass
class LoadRates:
    """How long a load takes, learnt from earlier ones: a latency, and a time for its bytes."""

    bytes_per_second: float
    latency: float  # seconds
    num_seen: int = 0

    def seconds(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bytes_per_second

    def observe_read(self, nbytes: int, seconds: float) -> None:
        """The store's own part: what was read and verified, and for how long."""
        if nbytes < MIN_BYTES:
            return
        rate = nbytes / max(seconds, 1e-6)
        weight = FORGETTING if self.num_seen else 1.0
        self.bytes_per_second += weight * (rate - self.bytes_per_second)
        self.num_seen += 1

    def observe_late(self, nbytes: int, seconds: float) -> None:
        """These bytes did not arrive in that time: they take longer."""
        if nbytes < MIN_BYTES:
            self.observe_rest(seconds)
        else:
            self.observe_read(nbytes, seconds)

    def observe_rest(self, seconds: float) -> None:
        """From the start of a whole load to its end, less its reads."""
        self.latency += FORGETTING * (seconds - self.latency)

    def decline(self) -> None:
        """It seemed too slow. A tier that was busy for a while is tried again some time."""
        self.bytes_per_second *= HOPE
        self.latency /= HOPE


@dataclass(frozen=True)
class TierKind:
    name: TierName
    first_bytes_per_second: float  # of loads, until one was measured
    first_latency: float  # seconds
    max_bytes_written: float  # a second; 0: this engine writes nothing to it
    outlives: bool  # the process: worth writing to when an engine is about to stop

    def rates(self) -> LoadRates:
        return LoadRates(self.first_bytes_per_second, self.first_latency)


# Until it was measured: as fast as files in the page cache. A slow disk is noticed by one late
# load; a fast one that was taken for slow would never be tried. Written slowly: others use it too.
DISK = TierKind("disk", 8e9, 0.01, 256e6, outlives=True)
# Verified by a few threads, and sent over a bus that is faster than they are.
HOST = TierKind("host", 8e9, 0.004, 2e9, outlives=False)
# What prefill engines sent lies in the host's memory; and what this one sends to others.
PEER = TierKind("peer", 8e9, 0.004, 0.0, outlives=False)
OUTGOING = TierKind("peer", 8e9, 0.004, float("inf"), outlives=False)


class Span(NamedTuple):
    """Tokens [start, stop) of an entry's own; of a state or a hidden vector [0, 1)."""

    entry: Entry
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.num_tokens == num_parts(self.entry)


def num_parts(entry: Entry) -> int:
    """How many tokens its payload divides into."""
    return entry.key.num_tokens or 1


@dataclass(eq=False)
class Owned:
    """An entry that the tree names, and the parts by which it does: each knows its node."""

    entry: Entry
    on_unused: Callable[[Owned], None]
    parts: dict[EntryPart, None] = field(default_factory=dict)  # a set, in a fixed order
    unreadable: bool = False  # it did not read back as it was written

    @property
    def key(self) -> Key:
        return self.entry.key

    def part(self) -> EntryPart:
        """All of it, for an insert."""
        return EntryPart(self, 0, num_parts(self.entry))


class EntryPart:
    """A payload of the disk's tree."""

    __slots__ = ("node", "owner", "start", "stop")

    def __init__(self, owner: Owned, start: int, stop: int) -> None:
        self.owner = owner
        self.start = start
        self.stop = stop
        self.node: Node | None = None  # that has it; None: an insert has yet to place it
        owner.parts[self] = None

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> Span:
        return Span(self.owner.entry, self.start, self.stop)

    @property
    def nbytes(self) -> int:
        """Such that those of all parts add up."""
        nbytes, total = self.owner.entry.nbytes, num_parts(self.owner.entry)
        return nbytes * self.stop // total - nbytes * self.start // total

    def split(self, at: int) -> tuple[Payload, Payload]:
        cut = self.start + at
        del self.owner.parts[self]
        return EntryPart(self.owner, self.start, cut), EntryPart(self.owner, cut, self.stop)

    def release(self) -> None:
        owner = self.owner
        assert self in owner.parts, "a part was released twice"
        del owner.parts[self]
        if not owner.parts:
            owner.on_unused(owner)

    def fingerprint(self) -> int:
        """Its bytes are verified when they are read; this is what they are read by."""
        return hash((self.owner.key, self.start, self.stop))


@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) of one component, or what is kept after `end`."""

    component: Component
    start: int
    end: int
    spans: tuple[Span, ...]

    @property
    def num_tokens(self) -> int:
        """Of the payload that it becomes."""
        return self.end - self.start if self.component.divides else 1

    @property
    def nbytes(self) -> int:
        """To read: entries are read whole."""
        return sum(span.entry.nbytes for span in self.spans)

    @property
    def keys(self) -> list[Key]:
        return [span.entry.key for span in self.spans]


def pieces(match: Match, held: int, max_bytes: int) -> list[Piece]:
    """What restores a match on disk where memory holds the KV of the first `held` tokens.

    In the order in which a tree can take them.
    """
    found: list[Piece] = []
    for component in Component:
        spans = _spans(match.payloads.get(component, ()))
        if not spans or (component is Component.HIDDEN and match.length < match.prompt_len):
            continue
        if component.divides:
            first = held if component is Component.ATTENTION else 0
            found += _grouped(component, _from(first, match.length, spans), max_bytes)
        else:
            found.append(Piece(component, match.length, match.length, tuple(spans)))
    return found


def piece_of(component: Component, start: int, end: int, parts: Sequence[Payload]) -> Piece:
    """Of parts that follow each other along a path: KV of [start, end), or what is kept there."""
    return Piece(component, start if component.divides else end, end, tuple(_spans(parts)))


def _spans(parts: Sequence[Payload]) -> list[Span]:
    """Parts of one entry that follow each other as one: an entry is read whole, and once."""
    found: list[Span] = []
    for part in parts:
        assert isinstance(part, EntryPart)
        span = part.span
        if found and found[-1].entry is span.entry and found[-1].stop == span.start:
            span = Span(span.entry, found.pop().start, span.stop)
        found.append(span)
    return found


def _from(first: int, end: int, spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Spans that end at `end`, with their positions, less what lies before `first`."""
    start = end - sum(span.num_tokens for span in spans)
    for span in spans:
        stop = start + span.num_tokens
        if stop > first:
            skipped = max(0, first - start)
            yield start + skipped, Span(span.entry, span.start + skipped, span.stop)
        start = stop


def _grouped(
    component: Component, placed: Iterator[tuple[int, Span]], max_bytes: int
) -> Iterator[Piece]:
    """As many spans together as make a piece of `max_bytes`."""
    group: list[Span] = []
    start = nbytes = 0
    for position, span in placed:
        if group and nbytes + span.entry.nbytes > max_bytes:
            yield _piece(component, start, group)
            group, nbytes = [], 0
        if not group:
            start = position
        group.append(span)
        nbytes += span.entry.nbytes
    if group:
        yield _piece(component, start, group)


def _piece(component: Component, start: int, spans: Sequence[Span]) -> Piece:
    end = start + sum(span.num_tokens for span in spans)
    return Piece(component, start, end, tuple(spans))


def read(
    store: EntryStore[Any], piece: Piece, specs: Sequence[ArraySpec], buffer: Bytes
) -> tuple[Bytes, ...] | list[Key]:
    """The piece's arrays, in `buffer`; or the keys that could not be read. From any thread.

    An entry of which only a part is wanted is read to memory of its own first.
    """
    arrays = _divided(buffer, specs)
    targets: list[list[Bytes]] = []
    at = 0
    for span in piece.spans:
        end = at + span.num_tokens
        targets.append([s.tokens(a, at, end) for a, s in zip(arrays, specs, strict=True)])
        at = end
    spans = list(zip(piece.spans, targets, strict=True))
    into = [to if span.is_whole else span.entry.new_buffers() for span, to in spans]
    loaded = store.read(piece.keys, into)
    lost = [key for key, found in zip(piece.keys, loaded, strict=True) if found is None]
    if lost:
        return lost
    for (span, to), found in zip(spans, loaded, strict=True):
        if found is not None and not span.is_whole:
            for target, part in zip(to, views_of(found, span), strict=True):
                target[:] = part
    return arrays


def views_of(loaded: Loaded, span: Span) -> tuple[Bytes, ...]:
    """The arrays of a part of an entry."""
    arrays = zip(loaded.entry.arrays, loaded.arrays, strict=True)
    return tuple(spec.tokens(data, span.start, span.stop) for spec, data in arrays)


def num_bytes(specs: Sequence[ArraySpec]) -> int:
    return sum(spec.nbytes for spec in specs)


def _divided(buffer: Bytes, specs: Sequence[ArraySpec]) -> tuple[Bytes, ...]:
    ends = accumulate((spec.nbytes for spec in specs), initial=0)
    return tuple(buffer[at:end] for at, end in pairwise(ends))


MAX_REMOVALS = 8  # nodes and parts in one `remove_lost`: about half a millisecond on a slow core
# A path first, then where it can end, then what is kept only at such an end.
ORDER = (Component.ATTENTION, Component.STATE, Component.WINDOW, Component.HIDDEN)

# How a payload of so many tokens looks as bytes: `Backend.payload_arrays`.
Format = Callable[[Component, int], tuple[ArraySpec, ...]]


class TierTree:
    def __init__(
        self,
        fingerprint: bytes,
        components: Sequence[Component],
        window: int,
        format: Format,
        canary: Canary,
    ) -> None:
        self.cache = PrefixCache(components, window=window, capacity_bytes=None, canary=canary)
        self._fingerprint = fingerprint
        self._components = tuple(components)
        self._format = format
        self._owned: dict[Key, Owned] = {}
        self._lost: dict[Key, Owned] = {}  # these leave the tree once they are not locked
        self._num_added = 0  # since the last `remove_lost`: as many more leave the tree
        self._unused: list[Key] = []  # nothing of these is in the tree any more
        # Of the salt and the tokens that were hashed last.
        self._last_chain = b"", b"", Chain(fingerprint)
        self.num_unreadable = 0  # entries that did not read back as they were written
        self.cache.tree.observers += (_Places(),)

    @property
    def num_entries(self) -> int:
        return len(self._owned)

    def fill(self, store: EntryStore[Any]) -> None:
        """Add what an earlier process wrote; what has no path from the root is not wanted."""
        found = rebuild(store.entries(), self._fingerprint)
        self._unused += found.orphans
        plain = Chain(self._fingerprint).key
        for placed in sorted(found.placed, key=lambda one: ORDER.index(one.entry.key.component)):
            entry = placed.entry
            if self._is_readable(entry):
                ids = np.frombuffer(placed.path_tokens(), dtype=np.int32)
                self.add(ids, entry, b"" if placed.root == plain else placed.root)
            else:
                self._unused.append(entry.key)  # of a backend with another layout
        self._num_added = 0

    def _is_readable(self, entry: Entry) -> bool:
        component = entry.key.component
        is_kept = component in self._components
        return is_kept and entry.arrays == self._format(component, num_parts(entry))

    def root(self, salt: bytes) -> bytes:
        """What this tree has in place of a salt: an earlier process left a chain's root alone."""
        return Chain(self._fingerprint, salt).key if salt else b""

    def entry(self, ids: TokenArray, component: Component, start: int, salt: bytes = b"") -> Entry:
        """The entry for a component of the path `ids`: KV of [start, end), or what is at its end.

        For the latter, `start` is how much of the path this tree has already.
        """
        (entry,) = self.entries(ids, ((component, start, len(ids)),), salt)
        return entry

    def entries(
        self, ids: TokenArray, runs: Sequence[tuple[Component, int, int]], salt: bytes = b""
    ) -> list[Entry]:
        """The entries for components of the path `ids`, each from a start to an end."""
        chains = self._chains(ids, {at for _, *ends in runs for at in ends}, salt)
        entries: list[Entry] = []
        for component, start, end in runs:
            num_tokens = end - start if component.divides else 0
            key = Key(chains[end].key, component, num_tokens)
            specs = self._format(component, num_tokens or 1)
            entries.append(Entry(key, chains[start].key, start, ids[start:end].tobytes(), specs))
        return entries

    def _chains(self, ids: TokenArray, places: set[int], salt: bytes) -> dict[int, Chain]:
        """At these places of a path: hashed once, and on from where the last path ended."""
        root, tokens, chain = self._last_chain
        first = min(places, default=0)
        if root != salt or chain.length > first or ids[: chain.length].tobytes() != tokens:
            chain = Chain(self._fingerprint, salt)
        chains: dict[int, Chain] = {}
        for place in sorted(places):
            if place > chain.length:
                chain = chain.extended(ids[chain.length : place])
            chains[place] = chain
        self._last_chain = salt, ids[: chain.length].tobytes(), chain
        return chains

    def add(self, ids: TokenArray, entry: Entry, root: bytes = b"") -> None:
        """An entry has been written; it is not wanted where it does not connect."""
        self.add_all(ids[: entry.end], [entry], root)

    def add_all(self, ids: TokenArray, entries: Iterable[Entry], root: bytes = b"") -> None:
        """Entries of one path. All its states are inserted in one walk along it."""
        states: dict[int, Payload] = {}
        for entry in entries:
            part = self._part(entry)
            if part is None:
                continue
            if entry.key.component is Component.STATE:
                states[entry.end] = part
                continue
            # What is kept behind a state needs it.
            states = self._insert_states(ids, states, root)
            path = ids[: entry.end]
            self.cache.insert_component(path, entry.key.component, entry.start, part, root)
        self._insert_states(ids, states, root)

    def _insert_states(
        self, ids: TokenArray, states: dict[int, Payload], root: bytes
    ) -> dict[int, Payload]:
        """Returns those that are left to insert: none."""
        if states:
            self.cache.insert(ids[: max(states)], 0, {}, states, salt=root)
        return {}

    def _part(self, entry: Entry) -> EntryPart | None:
        """All of it, to be inserted; None if the tree names it already."""
        owner = self._owned.get(entry.key)
        if owner is None or self._is_flushed(owner):
            self._lost.pop(entry.key, None)
            owner = self._owned[entry.key] = Owned(entry, self._forget)
        elif self._lost.pop(entry.key, None) is None:
            return None
        owner.unreadable = False
        self._num_added += 1
        # Of one that was lost, what had left the tree by now is missing; the rest is released.
        return owner.part()

    def lose(self, keys: Iterable[Key], *, unreadable: bool = False) -> None:
        """The store does not have these any more, or they cannot be used."""
        for key in keys:
            owner = self._owned.get(key)
            if owner is None:
                continue
            self._lost[key] = owner
            if unreadable and not owner.unreadable:  # a store may have reported it before
                owner.unreadable = True
                self.num_unreadable += 1

    def remove_lost(self) -> list[Key]:
        """Remove some of what was lost from the tree; returns keys that the store may forget."""
        left, self._num_added = MAX_REMOVALS + self._num_added, 0
        for owner in list(islice(self._lost.values(), left)):
            if left <= 0:
                break
            left -= self._remove(owner, left)
            if owner.parts and left > 0:  # locked: tried again after the others
                self._lost[owner.key] = self._lost.pop(owner.key)
        unused, self._unused = self._unused, []
        return unused

    def is_lost(self, key: Key) -> bool:
        return key in self._lost

    def check_integrity(self) -> None:
        self.cache.check_integrity()
        live: dict[Owned, int] = {}
        for node in self.cache.radix.nodes():
            for payload in node.payloads:
                if payload is not None:
                    assert isinstance(payload, EntryPart)
                    live[payload.owner] = live.get(payload.owner, 0) + payload.num_tokens
                    assert payload.node is node, "a part does not know its node"
        owned = {owner: sum(part.num_tokens for part in owner.parts) for owner in live}
        assert live == owned, "entries of a tier and parts in its tree do not add up"
        named = set(self._owned.values())
        assert named <= live.keys(), "the tree names an entry of which it has nothing"
        assert all(map(self._is_flushed, live.keys() - named)), "an entry is named twice"
        assert self._lost.keys() <= self._owned.keys(), "what is not in the tree is kept as lost"

    def _remove(self, owner: Owned, limit: int) -> int:
        """Up to `limit` parts of an entry, or nodes below them; returns how many were looked at."""
        tree, removed = self.cache.tree, 0
        for part in list(islice(owner.parts, limit)):
            node = part.node
            assert node is not None
            if part in owner.parts:  # or else it was below another one
                removed += max(1, tree.discard(node, owner.key.component, limit - removed))
            if removed >= limit:
                break
        return removed

    def _is_flushed(self, owner: Owned) -> bool:
        """Whether no match finds an entry by any of its parts, and these wait to be freed."""
        if not self.cache.flushing:
            return False
        nodes = (part.node for part in owner.parts)
        return all(node is not None and self.cache.radix.is_flushed(node) for node in nodes)

    def _forget(self, owner: Owned) -> None:
        if self._owned.get(owner.key) is not owner:
            return  # flushed, and added again since: the store keeps it
        del self._owned[owner.key]
        self._lost.pop(owner.key, None)
        self._unused.append(owner.key)


class _Places(TreeObserver):
    """Keeps in each part the node that has it."""

    def changed(self, node: Node) -> None:
        for payload in node.payloads:
            if payload is not None:
                assert isinstance(payload, EntryPart)
                payload.node = node

    def split(self, upper: Node, lower: Node) -> None:
        self.changed(upper)
        self.changed(lower)
