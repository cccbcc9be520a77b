"""The tree with its payloads: every change to what is held, and the count of its bytes.

Knows how to grow, fill, drop and prune; does not know requests, matches or when to do so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pippin.cache.canary import Canary
from pippin.cache.components import COMPONENTS, STATE, WINDOW, Rules
from pippin.cache.eviction import EvictionQueue, Unit
from pippin.cache.policy import CheckpointPolicy, Placement
from pippin.cache.radix import Node, RadixTree, TokenArray
from pippin.cache.stats import CacheStats
from pippin.types import GRID, Payload

Filled = list[tuple[Node, int]]  # nodes and the component index that was attached to them


class Store:
    """Owns every payload in the tree and releases each exactly once."""

    def __init__(self, rules: Rules, policy: CheckpointPolicy, canary: Canary | None) -> None:
        self.rules = rules
        self.canary = canary
        self.tree = RadixTree()
        self.queue = EvictionQueue(rules, policy)
        self.stats = CacheStats()
        self.component_bytes = dict.fromkeys(rules.components, 0)
        self.tick = 0

    @property
    def nbytes(self) -> int:
        return sum(self.component_bytes.values())

    def touch(self, node: Node) -> int:
        """Mark the path to `node` as used now; returns the tick."""
        self.tick += 1
        stamp = (self.queue.level, self.tick)
        for above in node.ancestors():
            above.stamp = stamp
        return self.tick

    def end_node(self, node: Node, position: int) -> Node:
        """The node on the path to `node` that ends at `position`, split off if need be."""
        while node.start >= position and not node.is_root:
            assert node.parent is not None
            node = node.parent
        return node if node.end == position else self._split(node, position)

    def grow(self, path: list[Node], reach: int, ids: TokenArray) -> Node:
        """The node that ends with `ids`, whose first `reach` tokens already lie along `path`."""
        node = self.end_node(path[-1] if path else self.tree.root, reach)
        if reach < len(ids):
            parent, node = node, self.tree.append(node, ids[reach:])
            self.stats.tokens_inserted += node.num_tokens
            if self.canary is not None:
                self.canary.mark(node)
            self.queue.offer(parent)  # a leaf no more: its window and state can go on their own
        return node

    def add_states(
        self, tip: Node, states: Mapping[int, Payload], placements: Mapping[int, Placement]
    ) -> Filled:
        """Attach states to the ends of nodes along the path to `tip`."""
        filled: Filled = []
        node = tip
        for position in sorted(states, reverse=True):
            if position > tip.end:
                self.refuse(states[position])
                continue
            node = self.end_node(node, position)
            if node.payloads[STATE] is not None:
                self.refuse(states[position])
                continue
            default = Placement.REPLY_END if position % GRID else Placement.GRID
            node.placement = placements.get(position, default)
            node.state_uses = 0
            self.stats.placements[node.placement].placed += 1
            self._attach(node, STATE, states[position])
            filled.append((node, STATE))
        return filled

    def add_kv(self, tip: Node, index: int, start: int, payload: Payload) -> Filled:
        """Give a payload that covers [start, ...) to the nodes up to `tip` that lack it.

        Goes from the tip upwards and cuts pieces off the end of what is left:

            payload:  [ rest ............ | piece | already held: refused ]
            nodes:    [ parent ]  ...     [ node ]
        """
        filled: Filled = []
        rest: Payload | None = payload
        for node in list(_path_from(tip, start)):
            if node.payloads[index] is not None:
                continue
            if node.start < start:
                self._split(node, start)  # `node` is now the part from `start` on
            rest = self._keep_until(rest, node.end - start)
            head = None
            if node.start > start:
                head, rest = rest.split(node.start - start)
            self._attach(node, index, rest)
            filled.append((node, index))
            rest = head
            if rest is None:
                break
        if rest is not None:
            self.refuse(rest)
        return filled

    def refuse(self, *payloads: Payload) -> None:
        """Release what was handed in but is not wanted."""
        for payload in payloads:
            self.stats.bytes_duplicate += payload.nbytes
            payload.release()

    def settle(self, node: Node) -> None:
        """After a change: prune leaves that carry nothing, let the queue know of the rest."""
        while not node.is_root and not (node.children or node.pins or any_held(node)):
            node = self._cut_off(node)
        self.queue.offer(node)

    def take(self, node: Node, unit: Unit) -> int:
        """Evict; returns the bytes freed."""
        before = self.nbytes
        if unit is Unit.LEAF:
            self.remove(node)
        elif unit is Unit.STATE:
            self.drop(node, STATE)
        else:
            for below in self.rules.dependants(node):
                self.drop(below, STATE)
            self.drop(node, WINDOW)
        freed = before - self.nbytes
        self.stats.bytes_evicted += freed
        return freed

    def remove(self, leaf: Node) -> None:
        """A leaf goes whole; whatever it was the last reason for goes with it."""
        for index in range(len(COMPONENTS)):
            self._release(leaf, index)
        self.settle(self._cut_off(leaf))

    def drop(self, node: Node, index: int) -> None:
        """Leave a tombstone: the node stays, one component is gone."""
        self._release(node, index)
        self.settle(node)

    def _cut_off(self, leaf: Node) -> Node:
        self.queue.forget(leaf)
        return self.tree.remove(leaf)

    def _keep_until(self, payload: Payload | None, length: int) -> Payload:
        assert payload is not None
        if length == payload.num_tokens:
            return payload
        kept, held_already = payload.split(length)
        self.refuse(held_already)
        return kept

    def _split(self, node: Node, position: int) -> Node:
        upper = self.tree.split(node, position - node.start)
        for component, growth in self.rules.divide(upper, node).items():
            self.component_bytes[component] += growth
        if self.canary is not None:
            self.canary.divide(upper, node)
        self.queue.offer(upper)
        self.queue.offer(node)
        return upper

    def _attach(self, node: Node, index: int, payload: Payload) -> None:
        node.payloads[index] = payload
        self.component_bytes[COMPONENTS[index]] += payload.nbytes
        self.stats.bytes_inserted += payload.nbytes
        if self.canary is not None:
            self.canary.seal(node, index)
        self.queue.offer(node)

    def _release(self, node: Node, index: int) -> None:
        payload = node.payloads[index]
        if payload is None:
            return
        node.payloads[index] = None
        node.prints[index] = None
        self.component_bytes[COMPONENTS[index]] -= payload.nbytes
        self.stats.evictions[COMPONENTS[index]] += 1
        if index == STATE:
            self.stats.placements[node.placement].evicted += 1
        payload.release()


def any_held(node: Node) -> bool:
    return any(payload is not None for payload in node.payloads)


def _path_from(tip: Node, start: int) -> Iterator[Node]:
    """`tip` and the nodes above it that hold a token at or after `start`."""
    for node in tip.ancestors():
        if node.end <= start:
            break
        yield node
