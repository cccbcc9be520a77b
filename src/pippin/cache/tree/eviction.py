"""In what order the cache evicts. Knows ranks and locks; drops nothing itself.

Three heaps hold what may be evicted: leaves (whole), interior windows and interior states. A rank
is the eviction level when a node was last used plus the worth of the unit, in tokens saved per
byte; the level rises to the rank of what was evicted last. Equal worth makes this exactly
least-recently-used; a cheap grid state is evicted long before a popular branch point, and what no
match can reach before everything else.

A use raises the ranks of a whole path. They are corrected only when a node is first in its heap. An
eviction looks at no more than MAX_CANDIDATES for its first unit and MIN_LOOKS for each other, and
takes the least that it knows: it costs the same in a tree whose every node was used since the last
eviction, and is exact while few were.
"""

from __future__ import annotations

import bisect
import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

from pippin.cache.policy import LEAF_PRIOR, PRIOR, Placement, worth
from pippin.cache.tree.components import STATE, WINDOW, Rules
from pippin.cache.tree.radix import Node

Rank = tuple[float, int]  # level and worth, tick
LAST: Rank = (math.inf, 0)


class NodeHeap:
    def __init__(self) -> None:
        self._entries: list[tuple[Rank, Node]] = []
        self._places: dict[Node, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def rank_of(self, node: Node) -> Rank | None:
        """The rank under which a node was put; None if it is not there."""
        place = self._places.get(node)
        return None if place is None else self._entries[place][0]

    @property
    def least(self) -> Rank:
        """The rank of the first node; LAST without one."""
        return self._entries[0][0] if self._entries else LAST

    @property
    def first(self) -> Node:
        return self._entries[0][1]

    def put(self, node: Node, rank: Rank) -> None:
        """Add a node, or move one that is there."""
        place = self._places.get(node)
        if place is None:
            place = len(self._entries)
            self._entries.append((rank, node))
            self._raise(place)
        else:
            self._replace(place, (rank, node))

    def discard(self, node: Node) -> None:
        """Remove a node, if it is there."""
        place = self._places.pop(node, None)
        if place is None:
            return
        last = self._entries.pop()
        if place < len(self._entries):
            self._replace(place, last)

    def _replace(self, place: int, entry: tuple[Rank, Node]) -> None:
        old = self._entries[place][0]
        self._entries[place] = entry
        if entry[0] < old:
            self._raise(place)
        else:
            self._lower(place)

    def _raise(self, place: int) -> None:
        """Move an entry towards the first place, to where it belongs."""
        entries, places = self._entries, self._places
        entry = entries[place]
        rank = entry[0]
        while place > 0:
            above = entries[(place - 1) // 2]
            if above[0] <= rank:
                break
            entries[place] = above
            places[above[1]] = place
            place = (place - 1) // 2
        entries[place] = entry
        places[entry[1]] = place

    def _lower(self, place: int) -> None:
        """Move an entry away from the first place, to where it belongs."""
        entries, places = self._entries, self._places
        num_entries = len(entries)
        entry = entries[place]
        rank = entry[0]
        while (child := 2 * place + 1) < num_entries:
            below = entries[child]
            if child + 1 < num_entries and entries[child + 1][0] < below[0]:
                child += 1
                below = entries[child]
            if rank <= below[0]:
                break
            entries[place] = below
            places[below[1]] = place
            place = child
        entries[place] = entry
        places[entry[1]] = place


MAX_CANDIDATES = 16
MIN_LOOKS = 4
NEVER = 1 << 62  # a tick that no use will have
COPIED = 0.25  # the share of its worth that a payload keeps when the tier below has it too
USELESS = -1.0  # a rank below every level: no match can reach it


class Unit(enum.IntEnum):
    """What can be evicted on its own."""

    LEAF = 0  # a node without children, with all it carries
    WINDOW = 1  # of an interior node
    STATE = 2  # of an interior node


class UnitHeap(NodeHeap, ABC):
    """The nodes of which one unit may be evicted, least rank first."""

    unit: ClassVar[Unit]

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self._rules = rules

    @abstractmethod
    def evictable(self, node: Node) -> bool:
        """Whether this unit of the node may be evicted now."""

    @abstractmethod
    def rank(self, node: Node) -> Rank:
        """Of an evictable unit, as of now."""

    def update(self, node: Node) -> None:
        if self.evictable(node):
            self.put(node, self.rank(node))
        else:
            self.discard(node)


class Leaves(UnitHeap):
    unit = Unit.LEAF

    def evictable(self, node: Node) -> bool:
        return not node.children and not node.locks and node.parent is not None

    def rank(self, node: Node) -> Rank:
        level, tick = node.stamp
        if self._rules.is_dead(node):
            return USELESS, tick
        value = worth(LEAF_PRIOR, node.state_uses, self._rules.num_saved(node), node.nbytes)
        return level + (value * COPIED if self._rules.is_copied(node) else value), tick


class Windows(UnitHeap):
    unit = Unit.WINDOW

    def evictable(self, node: Node) -> bool:
        if node.payloads[WINDOW] is None or not node.children:
            return False
        return not node.window_users and not node.window_locks

    def rank(self, node: Node) -> Rank:
        level, tick = node.stamp
        if self._rules.has_state:
            return USELESS, tick  # no state looks back on it
        window = node.payloads[WINDOW]
        assert window is not None
        prior = PRIOR[Placement.GRID]
        return level + worth(prior, node.window_uses, node.num_tokens, window.nbytes), tick


class States(UnitHeap):
    unit = Unit.STATE

    def evictable(self, node: Node) -> bool:
        return node.payloads[STATE] is not None and bool(node.children) and not node.locks

    def rank(self, node: Node) -> Rank:
        """The window that the state keeps is weighed with it."""
        level, tick = node.stamp
        window, state = node.payloads[WINDOW], node.payloads[STATE]
        assert state is not None
        nbytes = state.nbytes + (0 if window is None else window.nbytes)
        prior = PRIOR[node.placement]
        value = worth(prior, node.state_uses, self._rules.num_saved(node), nbytes)
        return level + (value * COPIED if node.copied >> STATE & 1 else value), tick


@dataclass(frozen=True)
class Candidate:
    rank: Rank
    node: Node
    heap: UnitHeap

    @property
    def is_current(self) -> bool:
        return self.heap.rank_of(self.node) == self.rank and self.heap.evictable(self.node)


class Search:
    """Finds what to evict, one unit after another, for one call of `EvictionQueue.evict`."""

    def __init__(self, heaps: Sequence[UnitHeap], spare_since: int) -> None:
        self.spared: list[Node] = []  # passed over: these have left their heaps
        self._heaps = heaps
        self._spare_since = spare_since
        self._candidates: list[Candidate] = []  # the least of those looked at, least first

    def next(self) -> Candidate | None:
        """What has the least rank, or nearly so; None if nothing may be evicted."""
        found = [candidate for candidate in self._candidates if candidate.is_current]
        num_looks = max(MIN_LOOKS, MAX_CANDIDATES - len(found))
        while num_looks > 0:
            heap = min(self._heaps, key=attrgetter("least"))
            if heap.least >= (found[0].rank if found else LAST):
                break  # nothing that was not looked at can be less
            candidate = self._look_at(heap)
            if candidate is not None:
                num_looks -= 1
                bisect.insort(found, candidate, key=attrgetter("rank"))
        self._candidates = found[:MAX_CANDIDATES]
        return found[0] if found else None

    def _look_at(self, heap: UnitHeap) -> Candidate | None:
        """Correct the rank of a heap's first node, or remove it if it must stay."""
        node = heap.first
        if not heap.evictable(node):  # locked since; `unlock` updates it
            heap.discard(node)
            return None
        if node.stamp[1] >= self._spare_since:
            heap.discard(node)
            self.spared.append(node)
            return None
        rank = heap.rank(node)
        heap.put(node, rank)
        return Candidate(rank, node, heap)


class EvictionQueue:
    def __init__(self, rules: Rules, *, evicts: bool) -> None:
        """Without `evicts` it has no heaps: `update` costs nothing and `evict` frees nothing."""
        self.level = 0.0
        kinds = ((States, rules.has_state), (Windows, rules.has_window), (Leaves, True))
        # Of equal ranks, the unit in the first heap is evicted.
        self._heaps = tuple(heap(rules) for heap, has_unit in kinds if evicts and has_unit)

    def update(self, node: Node) -> None:
        """Call when something of `node` may have become evictable, worth less, or was removed."""
        for heap in self._heaps:
            heap.update(node)

    def evict(self, nbytes: int, take: Callable[[Node, Unit], int], *, spare_since: int) -> int:
        """Have `take` drop units, least rank first, until it has freed `nbytes`; returns the sum.

        Nodes used at tick `spare_since` or later are passed over.
        """
        freed = 0
        search = Search(self._heaps, spare_since)
        while freed < nbytes and self._heaps:
            least = search.next()
            if least is None:
                break
            self.level = max(self.level, least.rank[0])
            least.heap.discard(least.node)
            freed += take(least.node, least.heap.unit)
        for node in search.spared:
            self.update(node)
        return freed

    def is_queued(self, node: Node) -> bool:
        """Whether every evictable unit of `node` is in its heap."""
        heaps = [heap for heap in self._heaps if heap.evictable(node)]
        return all(heap.rank_of(node) is not None for heap in heaps)

    def num_entries(self, node: Node) -> int:
        return sum(heap.rank_of(node) is not None for heap in self._heaps)

    def __len__(self) -> int:
        return sum(map(len, self._heaps))
