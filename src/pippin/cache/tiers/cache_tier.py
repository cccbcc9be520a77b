"""Tiers below the tree in memory: host memory under a device's own, then the disk.

trees         Each tier has a PrefixCache too, whose payloads are parts of a store's entries. So
              one set of rules says where a match may end and what a split divides, and one
              check of integrity counts both.
write behind  What a step inserted in memory is written soon after, once, in one entry for each
              run of KV. A kill loses what was not written yet. What a tier has is evicted from
              memory first, at no cost: there is no other demotion.
what          All KV, hidden vectors, and states where a request is likely to continue: ends of
              prompts, replies and messages, branches, and every 1,024 tokens.
order         An entry is added to the tier's tree when it has been written, payload before
              index, and only where it connects. Diffs of the two trees along a sequence say
              what is missing, so a split, an eviction or a failed write needs no repair.
loads         What a tier has and memory lacks of a prompt, up to an endpoint that every
              component can restore, is read into one buffer a component, becomes one payload
              each, and is inserted like something that a step captured.
damage        An entry that does not read back as it was written is dropped with all below it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from pippin.cache.entries import ArraySpec, Chain, Entry, EntryStore, Key, rebuild
from pippin.cache.policy import Placement
from pippin.cache.prefix_cache import Match, PrefixCache
from pippin.cache.tiers.tier_io import (
    EntryPart,
    Owned,
    Piece,
    num_bytes,
    pieces,
    spans,
)
from pippin.cache.tree.canary import Canary
from pippin.cache.tree.components import HIDDEN, INDEX, STATE, WINDOW, Rules
from pippin.cache.tree.payload_tree import TreeObserver
from pippin.cache.tree.radix import Node, TokenArray, as_tokens
from pippin.types import GRID, Component, ModelSpec, Payload, TierName

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


# Until it was measured: as fast as files in the page cache. A slow disk is noticed by one late
# load; a fast one that was taken for slow would never be tried. Written slowly: others use it too.
DISK = TierKind("disk", 8e9, 0.01, 256e6, outlives=True)
# Verified by a few threads, and sent over a bus that is faster than they are.
HOST = TierKind("host", 8e9, 0.004, 2e9, outlives=False)
# What prefill engines sent lies in the host's memory; and what this one sends to others.
PEER = TierKind("peer", 8e9, 0.004, 0.0, outlives=False)
OUTGOING = TierKind("peer", 8e9, 0.004, float("inf"), outlives=False)


MAX_REMOVALS = 8  # nodes and parts in one `remove_lost`: about half a millisecond on a slow core
# A path first, then where it can end, then what is kept only at such an end.
ORDER = (Component.ATTENTION, Component.STATE, Component.WINDOW, Component.HIDDEN)

# How a payload of so many tokens looks as bytes: `Backend.payload_arrays`.
Format = Callable[[Component, int], tuple[ArraySpec, ...]]


STATE_STRIDE = 1024  # tokens between states on disk where no request is expected to continue


@dataclass(frozen=True)
class Run:
    """What one entry is to hold: KV of [start, end), or what is kept after `end`."""

    component: Component
    start: int  # of the latter, how far the path lies on disk by then
    end: int
    payloads: tuple[Payload, ...]  # borrowed from the tree above

    @property
    def piece(self) -> Piece:
        """Of a tier's tree."""
        start = self.start if self.component.divides else self.end
        return Piece(self.component, start, self.end, tuple(spans(self.payloads)))


def is_worth_writing(node: Node) -> bool:
    """States are large. Those on the grid are many, and few of them are used again."""
    likely = node.placement is not Placement.GRID or node.state_uses > 0
    return likely or node.end % STATE_STRIDE == 0


@dataclass
class Diff:
    """Finds the runs to write next, of one sequence, within `left` bytes; none if all is there."""

    rules: Rules
    above: PrefixCache
    disk: PrefixCache
    format: Format
    left: int
    wants_state: Callable[[Node], bool] = is_worth_writing
    runs: list[Run] = field(default_factory=list)

    def find(self, ids: TokenArray, salt: bytes = b"", root: bytes = b"") -> list[Run]:
        """`salt` and `root`: by what the tree above, and the disk's, know the salt."""
        path, reach = self.above.radix.walk(ids, salt)
        held = path[:-1] if path and path[-1].end > reach else path
        if not held:
            return []
        on_disk, disk_reach = self.disk.radix.walk(ids[: held[-1].end], root)
        top = disk_reach
        if self.rules.has_attention:
            top = self._add_attention(held[-1], disk_reach)
        kept = list(held[-1].ancestors())[::-1]  # once more: nodes may have been cut
        known = {node.end: node.payloads for node in on_disk}
        ends = self._add_ends(kept, known, top)
        self._add_windows(ends, on_disk)
        for node in ends if self.rules.has_hidden else ():
            there = known.get(node.end)
            missing = there is None or there[HIDDEN] is None
            if node.payloads[HIDDEN] is not None and missing and self._fits(Component.HIDDEN, 1):
                self._add(Component.HIDDEN, node.end, [node])
        return self.runs

    def _add_attention(self, last: Node, disk_reach: int) -> int:
        """All below what the disk has; returns how far the disk will have it."""
        if disk_reach >= last.end:
            return disk_reach
        most = self.left // num_bytes(self.format(Component.ATTENTION, 1))
        end = min(last.end, disk_reach + most)
        if end < last.end:
            end -= end % GRID
        if end <= disk_reach:
            return disk_reach
        for position in (end, disk_reach):
            if position:
                self.above.end_node(last, position)
        nodes = [node for node in last.ancestors() if disk_reach < node.end <= end][::-1]
        self._add(Component.ATTENTION, disk_reach, nodes)
        self.left -= num_bytes(self.format(Component.ATTENTION, end - disk_reach))
        return end

    def _add_ends(
        self, held: Sequence[Node], known: Mapping[int, Sequence[Payload | None]], top: int
    ) -> list[Node]:
        """Where matches are to end on disk: at states, as far as there is room for them."""
        connected = held if not self.rules.has_attention else [n for n in held if n.end <= top]
        if not self.rules.has_state:  # ends of prompts, and the path's end
            return [n for n in connected if n.payloads[HIDDEN] is not None or n is connected[-1]]
        stops = [node for node in connected if node.payloads[STATE] is not None]
        ends: list[Node] = []
        reach = top
        for node, below in zip_longest(stops, stops[1:]):
            there = known.get(node.end)
            if there is not None and there[STATE] is not None:
                ends.append(node)
            elif self._is_wanted(node, below) and self._fits(Component.STATE, 1):
                self._add(Component.STATE, min(reach, node.end), [node])
                reach = max(reach, node.end)
                ends.append(node)
        return ends

    def _is_wanted(self, node: Node, below: Node | None) -> bool:
        """Without a hidden vector the same prompt again needs the state before its end."""
        if self.wants_state(node):
            return True
        return not self.rules.has_hidden and below is not None and self.wants_state(below)

    def _add_windows(self, ends: Sequence[Node], on_disk: Sequence[Node]) -> None:
        """The windows that a restore at these ends needs, each run of tokens once."""
        if not self.rules.has_window:
            return
        floors = [end.end - self.rules.window for end in ends]
        for end, floor in zip(ends, floors, strict=True):  # all of them first: a node is cut once
            if floor > 0:
                self.above.end_node(end, floor)
        needed: dict[int, Node] = {}  # by start
        for end, floor in zip(ends, floors, strict=True):
            needed |= {node.start: node for node in end.back_to(floor)}
        starts = [node.start for node in on_disk]
        run: list[Node] = []
        for _, node in sorted(needed.items()):
            if node.payloads[WINDOW] is None or not _lacks_window(on_disk, starts, node):
                continue
            if run and run[-1].end != node.start:
                self._add(Component.WINDOW, run[0].start, run)
                run = []
            if self._fits(Component.WINDOW, node.num_tokens):
                run.append(node)
        if run:
            self._add(Component.WINDOW, run[0].start, run)

    def _fits(self, component: Component, num_tokens: int) -> bool:
        """Whether there is room for so much; if so it is taken."""
        nbytes = num_bytes(self.format(component, num_tokens))
        if nbytes > self.left:
            return False
        self.left -= nbytes
        return True

    def _add(self, component: Component, start: int, nodes: Sequence[Node]) -> None:
        payloads = [node.payloads[INDEX[component]] for node in nodes]
        held = tuple(payload for payload in payloads if payload is not None)
        assert len(held) == len(nodes)
        self.runs.append(Run(component, start, nodes[-1].end, held))


def _lacks_window(on_disk: Sequence[Node], starts: Sequence[int], node: Node) -> bool:
    first = max(0, bisect_right(starts, node.start) - 1)
    across = on_disk[first : bisect_left(starts, node.end)]
    covered = sum(max(0, min(n.end, node.end) - max(n.start, node.start)) for n in across)
    return covered < node.num_tokens or any(n.payloads[WINDOW] is None for n in across)


MIN_LOADED_TOKENS = GRID  # fewer are not worth a wait
MAX_LOOKS = 8  # at shorter and shorter matches, while the store has evicted parts of each


@dataclass
class TierStats:
    """Counters since start."""

    spilled_entries: int = 0
    spilled_bytes: int = 0
    device_bytes: int = 0  # copied from the device to be spilled; the rest, from the tier above
    failed_spills: int = 0  # entries that the store did not keep
    loads: int = 0  # started
    loaded: int = 0  # finished, with every piece
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    late_loads: int = 0  # cancelled because computing would have been faster
    failed_loads: int = 0  # because of the store, a failed step or too few free bytes
    declined_loads: int = 0  # that would have taken longer than computing


@dataclass(frozen=True)
class TierMatch:
    """What the tier can add to what memory holds of a prompt."""

    match: Match = field(repr=False)  # in its tree
    memory_length: int  # of a match in memory now
    pieces: list[Piece] = field(repr=False)

    @property
    def num_tokens(self) -> int:
        """Tokens that a load saves from being computed."""
        return self.match.length - self.memory_length

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


class CacheTier:
    def __init__(
        self,
        memory: PrefixCache,
        store: EntryStore[Any],
        spec: ModelSpec,
        format: Format,
        *,
        canary: Canary,
        batch_bytes: int,
        kind: TierKind = DISK,
        level: int = 0,
        on_grid: bool = False,
        wants_state: Callable[[Node], bool] = is_worth_writing,
    ) -> None:
        """`batch_bytes`: of a write, and about of a piece that is read. `level`: how many faster
        tiers lie between it and memory. `on_grid`: prompts are restored up to whole blocks alone
        (deterministic). `wants_state`: whether that of a node is to be written."""
        self.kind = kind
        self.level = level
        self.memory = memory
        self.format = format
        self.batch_bytes = batch_bytes
        self.stats = TierStats()
        self.rates = LoadRates(kind.first_bytes_per_second, kind.first_latency)
        self.num_unreadable = 0  # entries that did not read back as they were written
        # What it has: the rules of the tree in memory, over parts of entries. It evicts nothing.
        self.cache = PrefixCache(
            spec.components, window=spec.window, capacity_bytes=None, canary=canary
        )
        self._components = spec.components
        self._store = store
        self._on_grid = on_grid
        self._wants_state = wants_state
        self._owned: dict[Key, Owned] = {}
        self._lost: dict[Key, Owned] = {}  # these leave the tree once they are not locked
        self._num_added = 0  # since the last `remove_lost`: as many more leave the tree
        self._unused: list[Key] = []  # nothing of these is in the tree any more
        # Of the salt and the tokens that were hashed last.
        self._last_chain = b"", b"", Chain(store.fingerprint)
        self.cache.observers += (_Places(),)
        self._fill()

    # ---- down ------------------------------------------------------------------------------

    def missing(
        self, tokens: npt.ArrayLike, salt: bytes = b"", above: CacheTier | None = None
    ) -> list[Run]:
        """What is to be written next of a sequence, of what memory has, or the tier above; its
        payloads are borrowed until a change."""
        source, root, wants_state = self.memory, salt, self._wants_state
        if above is not None:
            source, root = above.cache, above.root(salt)
            wants_state = lambda node: True  # noqa: E731  # it has those alone that were worth it
        rules, left = self.memory.rules, self.batch_bytes
        diff = Diff(rules, source, self.cache, self.format, left, wants_state)
        return diff.find(as_tokens(tokens), root, self.root(salt))

    def pieces(self, runs: Sequence[Run]) -> list[Piece]:
        """Of runs that the tier below lacks; none if the store has not all of them any more."""
        found = [run.piece for run in runs]
        return [] if self._lose_pieces(found) else found

    def wrote(
        self,
        tokens: npt.ArrayLike,
        entries: Sequence[Entry],
        kept: Sequence[bool],
        salt: bytes = b"",
    ) -> None:
        """These can be found from now on, if they were kept.

        The store may have evicted some since, for what was written after them, and reported that
        before the tree had them. It does not report it again.
        """
        ids, root = as_tokens(tokens), self.root(salt)
        there = [
            entry
            for entry, was_kept in zip(entries, kept, strict=True)
            if was_kept and entry.key in self._store
        ]
        self.add(ids, there, root)
        self.note_copies(ids, [(e.key.component, e.start, e.end) for e in there], salt)
        for entry, was_kept in zip(entries, kept, strict=True):
            if was_kept:
                self.stats.spilled_entries += 1
                self.stats.spilled_bytes += entry.nbytes
            else:
                self.stats.failed_spills += 1

    def note_copies(
        self, ids: TokenArray, copies: Sequence[tuple[Component, int, int]], salt: bytes = b""
    ) -> None:
        """Memory and this tier have components of [start, end) of this path: memory evicts first
        what the next tier has."""
        if not self.level and self.kind.max_bytes_written and copies:
            self.memory.mark_copied(ids, copies, salt)

    # ---- across ----------------------------------------------------------------------------

    def expect(self, tokens: npt.ArrayLike, num_held: int, salt: bytes = b"") -> list[Key]:
        """Attention KV of the first tokens is known to be elsewhere: what follows connects to it.

        The tree names an entry for it that no store has; nothing of it can be loaded.
        """
        if not num_held or not self.memory.rules.has_attention:
            return []
        ids = as_tokens(tokens)[:num_held]
        (entry,) = self.entries(ids, [Run(Component.ATTENTION, 0, num_held, ())], salt)
        self.add(ids, [entry], self.root(salt))
        return [entry.key]

    def arrived(self, tokens: npt.ArrayLike, entry: Entry, salt: bytes = b"") -> None:
        """Another engine has sent an entry of this sequence: it can be found from now on, if the
        store has not evicted it since."""
        if entry.key in self._store:
            self.add(as_tokens(tokens), [entry], self.root(salt))

    def keys_along(self, tokens: npt.ArrayLike, salt: bytes = b"") -> list[Key]:
        """Of the entries along a path, the deepest first: those above them are evicted later."""
        path, _ = self.cache.radix.walk(as_tokens(tokens), self.root(salt))
        found: dict[Key, None] = {}
        for node in reversed(path):
            for payload in reversed(node.payloads):
                if isinstance(payload, EntryPart):
                    found[payload.owner.key] = None
        return list(found)

    # ---- and up ----------------------------------------------------------------------------

    def find(self, tokens: npt.ArrayLike, salt: bytes = b"") -> TierMatch | None:
        """What can be loaded for a prompt, if enough; the caller decides whether it pays."""
        ids, root = as_tokens(tokens), self.root(salt)
        length = self.memory.probe_prompt(ids, salt)
        if self.cache.probe_prompt(ids, root) < length + MIN_LOADED_TOKENS:
            return None
        match = self.cache.match_prompt(ids, root)
        for _ in range(MAX_LOOKS):
            if self._on_grid and match.length % GRID:
                match = self.cache.match(ids, root, limit=match.length - match.length % GRID)
            if match.length < length + MIN_LOADED_TOKENS:
                return None
            held = min(self.memory.num_cached(ids[: match.length], salt), match.length)
            found = TierMatch(match, length, pieces(match, held, self.batch_bytes))
            limit = self._sound_limit(found)
            if limit is None:
                return found
            match = self.cache.match(ids, root, limit=limit)
        return None

    def _sound_limit(self, found: TierMatch) -> int | None:
        """How long a match may be that needs only what the store has; None: as it is.

        The tree may name lost entries for some steps: `remove_lost` removes a few a step.
        """
        last = found.match.length - 1
        lost = self._lose_pieces(found.pieces)
        return min((e.start if e.key.num_tokens else last for e in lost), default=None)

    def _lose_pieces(self, needed: Iterable[Piece]) -> list[Entry]:
        """Entries of these pieces that the store does not have any more."""
        entries = [span.entry for piece in needed for span in piece.spans]
        lost = [e for e in entries if e.key not in self._store or self.is_lost(e.key)]
        self.lose(entry.key for entry in lost)
        return lost

    # ---- its tree --------------------------------------------------------------------------

    def _fill(self) -> None:
        """Add what an earlier process wrote; what has no path from the root is not wanted."""
        found, orphans = rebuild(self._store.entries(), self._store.fingerprint)
        self._unused += orphans
        plain = Chain(self._store.fingerprint).key
        for placed in sorted(found, key=lambda one: ORDER.index(one.entry.key.component)):
            entry, component = placed.entry, placed.entry.key.component
            is_kept = component in self._components
            if is_kept and entry.arrays == self.format(component, entry.num_parts):
                ids = np.frombuffer(placed.path_tokens(), dtype=np.int32)
                self.add(ids, [entry], b"" if placed.root == plain else placed.root)
            else:
                self._unused.append(entry.key)  # of a backend with another layout
        self._num_added = 0

    def root(self, salt: bytes) -> bytes:
        """What this tree has in place of a salt: an earlier process left a chain's root alone."""
        return Chain(self._store.fingerprint, salt).key if salt else b""

    def entries(self, tokens: npt.ArrayLike, runs: Sequence[Run], salt: bytes = b"") -> list[Entry]:
        """The entries for runs of the path `tokens`."""
        ids = as_tokens(tokens)
        chains = self._chains(ids, {at for run in runs for at in (run.start, run.end)}, salt)
        entries: list[Entry] = []
        for run in runs:
            component, start, end = run.component, run.start, run.end
            num_tokens = end - start if component.divides else 0
            key = Key(chains[end].key, component, num_tokens)
            specs = self.format(component, num_tokens or 1)
            entries.append(Entry(key, chains[start].key, start, ids[start:end].tobytes(), specs))
        return entries

    def _chains(self, ids: TokenArray, places: set[int], salt: bytes) -> dict[int, Chain]:
        """At these places of a path: hashed once, and on from where the last path ended."""
        root, tokens, chain = self._last_chain
        first = min(places, default=0)
        if root != salt or chain.length > first or ids[: chain.length].tobytes() != tokens:
            chain = Chain(self._store.fingerprint, salt)
        chains: dict[int, Chain] = {}
        for place in sorted(places):
            if place > chain.length:
                chain = chain.extended(ids[chain.length : place])
            chains[place] = chain
        self._last_chain = salt, ids[: chain.length].tobytes(), chain
        return chains

    def add(self, ids: TokenArray, entries: Iterable[Entry], root: bytes = b"") -> None:
        """Entries of one path; they are not wanted where they do not connect. All its states are
        inserted in one walk along it."""
        states: dict[int, Payload] = {}
        for entry in entries:
            part = self._part(entry)
            if part is None:
                continue
            if entry.key.component is Component.STATE:
                states[entry.end] = part
                continue
            self._insert(ids, states, root)  # what is kept behind a state needs it
            path = ids[: entry.end]
            self.cache.insert_component(path, entry.key.component, entry.start, part, root)
        self._insert(ids, states, root)

    def _insert(self, ids: TokenArray, states: dict[int, Payload], root: bytes) -> None:
        if states:
            self.cache.insert(ids[: max(states)], 0, {}, dict(states), salt=root)
            states.clear()

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

    def remove_lost(self, limit: int | None = None) -> list[Key]:
        """Remove some of what was lost from the tree, a bounded number of nodes, of which the store
        reports `limit` entries; returns keys that it may forget. What was written again since is
        not lost."""
        reported = self._store.take_lost(limit)
        self.lose(key for key in reported if key not in self._store)
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

    def _remove(self, owner: Owned, limit: int) -> int:
        """Up to `limit` parts of an entry, or nodes below them; returns how many were looked at."""
        tree, removed = self.cache, 0
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

    def counters(self) -> dict[str, object]:
        cache = self.cache
        return {
            "entries": len(self._owned),
            "nodes": cache.radix.num_nodes,
            "tokens": cache.radix.num_tokens,
            "nbytes": cache.nbytes,
            "component_bytes": {c.value: n for c, n in cache.component_bytes.items()},
            "unreadable_entries": self.num_unreadable,
            "load_bytes_per_second": round(self.rates.bytes_per_second),
            **asdict(self.stats),
        }


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
