"""In what order the cache evicts.

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
import heapq
import math
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from pippin.cache.policy import LEAF_PRIOR, PRIOR, Placement, worth
from pippin.cache.tree.components import STATE, WINDOW, Rules
from pippin.cache.tree.radix import Node

Rank = tuple[float, int]  # level and worth, tick
LAST: Rank = (math.inf, 0)


MAX_LEFT_BEHIND = 16
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


# The rank of a unit of a node, as of now; None if it may not be evicted.


def leaf_rank(rules: Rules, node: Node) -> Rank | None:
    if node.children or node.locks or node.parent is None:
        return None
    level, tick = node.stamp
    if rules.is_dead(node):
        return USELESS, tick
    value = worth(LEAF_PRIOR, node.state_uses, rules.num_saved(node), node.nbytes)
    return level + (value * COPIED if rules.is_copied(node) else value), tick


def window_rank(rules: Rules, node: Node) -> Rank | None:
    window = node.payloads[WINDOW]
    if window is None or not node.children or node.window_users or node.window_locks:
        return None
    level, tick = node.stamp
    if rules.has_state:
        return USELESS, tick  # no state looks back on it
    prior = PRIOR[Placement.GRID]
    return level + worth(prior, node.window_uses, node.num_tokens, window.nbytes), tick


def state_rank(rules: Rules, node: Node) -> Rank | None:
    """The window that the state keeps is weighed with it."""
    window, state = node.payloads[WINDOW], node.payloads[STATE]
    if state is None or not node.children or node.locks:
        return None
    level, tick = node.stamp
    nbytes = state.nbytes + (0 if window is None else window.nbytes)
    prior = PRIOR[node.placement]
    value = worth(prior, node.state_uses, rules.num_saved(node), nbytes)
    return level + (value * COPIED if node.copied >> STATE & 1 else value), tick


class UnitHeap:
    """The nodes of which one unit may be evicted, by their ranks. What was moved or removed leaves
    an entry behind, which is skipped."""

    def __init__(self, unit: Unit, rank: Callable[[Node], Rank | None]) -> None:
        self.unit = unit
        self.rank = rank
        self._entries: list[tuple[Rank, int, Node]] = []
        self._ranks: dict[Node, Rank] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def rank_of(self, node: Node) -> Rank | None:
        """The rank under which a node was put; None if it is not there."""
        return self._ranks.get(node)

    @property
    def least(self) -> Rank:
        """The rank of the first node; LAST without one."""
        entries, ranks = self._entries, self._ranks
        while entries and ranks.get(entries[0][2]) != entries[0][0]:
            heapq.heappop(entries)
        return entries[0][0] if entries else LAST

    @property
    def first(self) -> Node:
        assert self.least != LAST
        return self._entries[0][2]

    def update(self, node: Node) -> None:
        self.put(node, self.rank(node))

    def put(self, node: Node, rank: Rank | None) -> None:
        """Add, move or, without a rank, remove a node."""
        if self._ranks.get(node) == rank:
            return
        if rank is None:
            del self._ranks[node]
        else:
            self._ranks[node] = rank
            heapq.heappush(self._entries, (rank, node.id, node))
        if len(self._entries) > 2 * len(self._ranks) + MAX_LEFT_BEHIND:
            self._entries = [(rank, node.id, node) for node, rank in self._ranks.items()]
            heapq.heapify(self._entries)


class Candidate(NamedTuple):
    rank: Rank
    node: Node
    heap: UnitHeap


class EvictionQueue:
    def __init__(self, rules: Rules, *, evicts: bool) -> None:
        """Without `evicts` it has no heaps: `update` costs nothing and `evict` frees nothing."""
        self.level = 0.0
        # Of equal ranks, the unit in the first heap is evicted.
        units = (
            (Unit.STATE, state_rank, rules.has_state),
            (Unit.WINDOW, window_rank, rules.has_window),
            (Unit.LEAF, leaf_rank, True),
        )
        self._heaps = tuple(
            UnitHeap(unit, partial(rank, rules))
            for unit, rank, has_unit in units
            if evicts and has_unit
        )

    def update(self, node: Node) -> None:
        """Call when something of `node` may have become evictable, worth less, or was removed."""
        for heap in self._heaps:
            heap.update(node)

    def evict(self, nbytes: int, take: Callable[[Node, Unit], int], *, spare_since: int) -> int:
        """Have `take` drop units, least rank first, until it has freed `nbytes`; returns the sum.

        Nodes used at tick `spare_since` or later are passed over.
        """
        freed = 0
        spared: list[Node] = []  # these have left their heaps
        found: list[Candidate] = []  # the least of those looked at, least first
        while freed < nbytes and self._heaps:
            found = [one for one in found if one.heap.rank_of(one.node) == one.rank]
            self._look(found, spared, spare_since)
            if not found:
                break
            del found[MAX_CANDIDATES:]
            least = found[0]
            self.level = max(self.level, least.rank[0])
            least.heap.put(least.node, None)
            freed += take(least.node, least.heap.unit)
        for node in spared:
            self.update(node)
        return freed

    def _look(self, found: list[Candidate], spared: list[Node], spare_since: int) -> None:
        """Correct the ranks of some first nodes, and add these to what was found."""
        num_looks = max(MIN_LOOKS, MAX_CANDIDATES - len(found))
        while num_looks > 0:
            heap = min(self._heaps, key=attrgetter("least"))
            if heap.least >= (found[0].rank if found else LAST):
                break  # nothing that was not looked at can be less
            node = heap.first
            rank = heap.rank(node)
            if rank is None or node.stamp[1] >= spare_since:
                heap.put(node, None)
                if rank is not None:  # or else locked since; `unlock` updates it
                    spared.append(node)
                continue
            heap.put(node, rank)
            num_looks -= 1
            bisect.insort(found, Candidate(rank, node, heap), key=attrgetter("rank"))

    def is_queued(self, node: Node) -> bool:
        """Whether every evictable unit of `node` is in its heap."""
        heaps = [heap for heap in self._heaps if heap.rank(node) is not None]
        return all(heap.rank_of(node) is not None for heap in heaps)

    def num_entries(self, node: Node) -> int:
        return sum(heap.rank_of(node) is not None for heap in self._heaps)

    def __len__(self) -> int:
        return sum(map(len, self._heaps))
