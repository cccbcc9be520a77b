"""In what order the cache gives things up. Knows ranks and pins; drops nothing itself.

One heap holds everything that could go: leaves (whole), interior windows and interior states.
An entry's rank is the eviction level when it was last used plus its worth, in tokens saved per
byte; the level rises to the rank of whatever was evicted last. Equal worth makes this exactly
least-recently-used; a cheap grid state goes long before a popular branch point. Leaves that no
match can reach go before everything.

Ranks rise at every use, so they are corrected lazily, when an entry comes to the top.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Callable

from pippin.cache.components import STATE, WINDOW, Rules
from pippin.cache.policy import CheckpointPolicy
from pippin.cache.radix import Node

DEAD = -1.0  # the rank of a leaf that nobody can reach
NEVER = 1 << 62  # a tick that no use will have

Rank = tuple[float, int]


class Unit(enum.IntEnum):
    """What can be evicted on its own."""

    LEAF = 0  # a node without children, with all it carries
    WINDOW = 1  # of an interior node
    STATE = 2  # of an interior node


class EvictionQueue:
    def __init__(self, rules: Rules, policy: CheckpointPolicy) -> None:
        self.level = 0.0
        self._rules = rules
        self._policy = policy
        self._heap: list[tuple[Rank, int, Node, Unit]] = []
        self._order = itertools.count()
        self._num_queued = 0

    def offer(self, node: Node) -> None:
        """Call whenever something of `node` may have become evictable, or worth less."""
        for unit in Unit:
            if self.evictable(node, unit):
                rank = self._rank(node, unit)
                queued = node.queued[unit]
                if queued is None or rank < queued:
                    self._push(rank, node, unit)

    def forget(self, node: Node) -> None:
        """Call when `node` leaves the tree."""
        for unit in Unit:
            if node.queued[unit] is not None:
                node.queued[unit] = None
                self._num_queued -= 1

    def evict(self, nbytes: int, take: Callable[[Node, Unit], int], *, spare_since: int) -> int:
        """Let `take` drop things, least worth first, until it has freed `nbytes`; returns the sum.

        Nodes used at tick `spare_since` or later are passed over.
        """
        freed = progress = 0
        while freed < nbytes:
            progress = self._evict_pass(nbytes - freed, take, spare_since)
            if not progress:
                break
            freed += progress
        return freed

    def __len__(self) -> int:
        """Entries in the heap, stale ones included."""
        return len(self._heap)

    def evictable(self, node: Node, unit: Unit) -> bool:
        if node.parent is None:
            return False
        if unit is Unit.LEAF:
            return not node.children and not node.pins
        if not node.children:
            return False
        if unit is Unit.WINDOW:
            return node.payloads[WINDOW] is not None and not node.window_pins
        return node.payloads[STATE] is not None and not node.pins

    def _evict_pass(self, nbytes: int, take: Callable[[Node, Unit], int], spare_since: int) -> int:
        freed = 0
        spared: list[tuple[Node, Unit]] = []
        while self._heap and freed < nbytes:
            rank, _, node, unit = heapq.heappop(self._heap)
            if node.queued[unit] != rank:
                continue  # a newer entry stands for this one
            node.queued[unit] = None
            self._num_queued -= 1
            if not self.evictable(node, unit):
                continue  # offered again when that changes
            current = self._rank(node, unit)
            if node.stamp[1] >= spare_since or self._holds_leaf(node, unit):
                spared.append((node, unit))
            elif current > rank:
                self._push(current, node, unit)
            else:
                self.level = max(self.level, rank[0])
                freed += take(node, unit)
        for node, unit in spared:
            if self.evictable(node, unit) and node.queued[unit] is None:
                self._push(self._rank(node, unit), node, unit)
        return freed

    def _holds_leaf(self, node: Node, unit: Unit) -> bool:
        return unit is Unit.WINDOW and self._rules.supports_leaf(node)

    def _rank(self, node: Node, unit: Unit) -> Rank:
        level, tick = node.stamp
        if unit is Unit.LEAF:
            if self._rules.is_dead(node):
                return DEAD, tick
            num_saved = self._rules.num_saved(node)
            return level + self._policy.leaf_value(node.state_uses, num_saved, node.nbytes), tick
        payload = node.payloads[WINDOW if unit is Unit.WINDOW else STATE]
        assert payload is not None
        if unit is Unit.WINDOW:
            worth = self._policy.window_value(node.window_uses, node.num_tokens, payload.nbytes)
        else:
            worth = self._policy.state_value(
                node.placement, node.state_uses, self._rules.num_saved(node), payload.nbytes
            )
        return level + worth, tick

    def _push(self, rank: Rank, node: Node, unit: Unit) -> None:
        if node.queued[unit] is None:
            self._num_queued += 1
        node.queued[unit] = rank
        heapq.heappush(self._heap, (rank, next(self._order), node, unit))
        if len(self._heap) > 1024 + 4 * self._num_queued:
            self._compact()

    def _compact(self) -> None:
        """Drop entries that were replaced or whose node is gone."""
        self._heap = [entry for entry in self._heap if entry[2].queued[entry[3]] == entry[0]]
        heapq.heapify(self._heap)
        self._num_queued = len(self._heap)
