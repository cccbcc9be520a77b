"""The tree with its payloads: every change to what is held, and the count of its bytes.

Knows how to grow, fill, drop and prune; does not know requests, matches or when to do so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pippin.cache.canary import Canary
from pippin.cache.components import COMPONENTS, HIDDEN, INDEX, STATE, WINDOW, Rules
from pippin.cache.eviction import EvictionQueue, Unit
from pippin.cache.lookback import Lookback
from pippin.cache.observer import TreeObserver
from pippin.cache.pins import Pins
from pippin.cache.policy import CheckpointPolicy, Placement
from pippin.cache.radix import Node, RadixTree, TokenArray
from pippin.cache.stats import CacheStats
from pippin.types import GRID, Component, Payload

NUM_RECENT = 5  # paths

Filled = list[tuple[Node, int]]  # nodes and the component index that was attached to them


class Store:
    """Owns every payload in the tree and releases each exactly once."""

    def __init__(self, rules: Rules, policy: CheckpointPolicy, canary: Canary | None) -> None:
        self.rules = rules
        self.canary = canary
        self.tree = RadixTree()
        self.pins = Pins(rules)
        self.queue = EvictionQueue(rules, policy)
        self.stats = CacheStats()
        self.component_bytes = dict.fromkeys(rules.components, 0)
        self.version = 0  # changes with every payload that comes or goes
        self.tick = 0
        self.recent: list[Node] = []  # where the paths end that were used last; some may be gone
        self.observer: TreeObserver | None = None  # None: nobody watches
        self._lookback = Lookback(rules)

    @property
    def nbytes(self) -> int:
        return sum(self.component_bytes.values())

    @property
    def evictable_bytes(self) -> int:
        return self.nbytes - self.pins.nbytes

    def touch(self, node: Node) -> int:
        """Mark the path to `node` as used now; returns the tick."""
        self.tick += 1
        stamp = (self.queue.level, self.tick)
        for above in node.ancestors():
            above.stamp = stamp
        if not node.is_root:
            others = [end for end in self.recent if end.stamp is not stamp]  # not on this path
            self.recent = [node, *others][:NUM_RECENT]
            if self.observer is not None:
                self.observer.used(node)
        return self.tick

    def pin(self, node: Node) -> int:
        """Keep what restores the sequence to `node`; the result is for `unpin`."""
        return self.pins.pin(node)

    def unpin(self, node: Node, floor: int) -> None:
        for free in self.pins.unpin(node, floor):
            if free.attached:  # or else pruned with the one before it
                self.settle(free)

    def end_node(self, node: Node, position: int) -> Node:
        """The node on the path to `node` that ends at `position`, split off if need be."""
        while node.start >= position and not node.is_root:
            assert node.parent is not None
            node = node.parent
        return node if node.end == position else self._split(node, position)

    def grow(self, path: list[Node], reach: int, ids: TokenArray, cuts: Iterable[int] = ()) -> Node:
        """The node that ends with `ids`, whose first `reach` tokens already lie along `path`.

        What is new of the path is one node, or several that end at the `cuts`.
        """
        parent = node = self.end_node(path[-1] if path else self.tree.root, reach)
        if reach == len(ids):
            return node
        was_leaf = not parent.children
        for end in sorted({*(cut for cut in cuts if reach < cut < len(ids)), len(ids)}):
            node = self.tree.append(node, ids[node.end : end])
            if self.canary is not None:
                self.canary.mark(node)
            if self.observer is not None:
                self.observer.added(node)
        self.stats.tokens_inserted += len(ids) - reach
        if not self.rules.has_state:
            self._lookback.count(node)
            if was_leaf:
                self._uncount(parent)
        self.queue.update(parent)  # a leaf no more: its window and state can go on their own
        return node

    def fill(
        self,
        tip: Node,
        start: int,
        kv: Mapping[Component, Payload],
        states: Mapping[int, Payload],
        placements: Mapping[int, Placement],
    ) -> Filled:
        """Give payloads to the nodes on the path to `tip` that lack them; releases the rest."""
        filled = self._add_states(tip, states, placements)
        for component, payload in kv.items():
            filled += self._add_kv(tip, INDEX[component], start, payload)
        for node in dict.fromkeys(node for node, _ in filled):
            self.queue.update(node)
        self.settle(tip)
        return filled

    def add_hidden(self, tip: Node, position: int, payload: Payload) -> Filled:
        """Attach a hidden vector to `tip` if it ends there, and could be restored to sample."""
        restorable = not self.rules.has_state or tip.payloads[STATE] is not None
        if tip.end != position or not restorable or tip.payloads[HIDDEN] is not None:
            self.refuse(payload)
            return []
        self._attach(tip, HIDDEN, payload)
        self.queue.update(tip)
        return [(tip, HIDDEN)]

    def mark_copied(self, node: Node, index: int) -> None:
        """A payload is in the tier below from now on: it costs less to lose."""
        if node.payloads[index] is not None:
            node.copied |= 1 << index
            self.queue.update(node)
            self.tell_changed(node)

    def refuse(self, *payloads: Payload) -> None:
        """Release what was handed in but is not wanted."""
        for payload in payloads:
            self.stats.bytes_duplicate += payload.nbytes
            payload.release()

    def settle(self, node: Node) -> None:
        """After a change: prune leaves that carry nothing, let the queue know of the rest."""
        while not node.is_root and not (node.children or node.pins or any_held(node)):
            node = self._cut_off(node)
        self.queue.update(node)

    def tell_changed(self, node: Node) -> None:
        if self.observer is not None:
            self.observer.changed(node)

    def take(self, node: Node, unit: Unit) -> int:
        """Evict; returns the bytes freed."""
        before = self.nbytes
        if unit is Unit.LEAF:
            self.remove(node)
        else:
            self.drop(node, WINDOW if unit is Unit.WINDOW else STATE)
        freed = before - self.nbytes
        self.stats.bytes_evicted += freed
        return freed

    def flush(self) -> None:
        """Drop everything that no lock holds."""
        self.queue.clear()
        for node in reversed(list(self.tree.nodes())):  # children before parents
            for index in range(len(COMPONENTS)):
                if not self.pins.holds(node, index):
                    self._release(node, index)
            if not node.holds:
                self._cut_off(node)
        for node in self.tree.nodes():
            self.queue.update(node)

    def remove(self, leaf: Node) -> None:
        """A leaf goes whole; whatever it was the last reason for goes with it."""
        for index in range(len(COMPONENTS)):
            self._release(leaf, index)
        self.settle(self._cut_off(leaf))

    def remove_below(self, node: Node) -> None:
        """Take a node off the tree with all that hangs below it; no lock may hold any of it."""
        assert not node.holds, f"a node at {node.end} is locked"
        for below in reversed(list(node.with_descendants())):
            if below.attached:  # or else pruned with its last child
                self.remove(below)

    def drop(self, node: Node, index: int) -> None:
        """Leave a tombstone: the node stays, one component is gone."""
        self._release(node, index)
        if index == STATE:
            self._release(node, HIDDEN)  # nobody can be restored there to sample from it
        self.settle(node)

    def _add_states(
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

    def _add_kv(self, tip: Node, index: int, start: int, payload: Payload) -> Filled:
        """Give a payload that covers [start, ...) to the nodes up to `tip` that lack it.

        Goes from the tip upwards and cuts pieces off the end of what is left:

            payload:  [ rest ............ | piece | already held: refused ]
            nodes:    [ parent ]  ...     [ node ]
        """
        filled: Filled = []
        rest: Payload | None = payload
        for node in list(tip.back_to(start)):
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

    def _cut_off(self, leaf: Node) -> Node:
        """Take a leaf that carries nothing off the tree; returns the parent it had."""
        parent = leaf.parent
        assert parent is not None
        if not self.rules.has_state:
            if len(parent.children) == 1:
                self._lookback.count(parent)  # first, so that few counts fall to zero in between
            self._uncount(leaf)
        self.tree.remove(leaf)
        if self.observer is not None:
            self.observer.removed(leaf, parent)
        self.queue.update(leaf)
        return parent

    def _uncount(self, end: Node) -> None:
        for free in self._lookback.uncount(end):
            self.queue.update(free)

    def _keep_until(self, payload: Payload | None, length: int) -> Payload:
        assert payload is not None
        if length == payload.num_tokens:
            return payload
        kept, held_already = payload.split(length)
        self.refuse(held_already)
        return kept

    def _split(self, node: Node, position: int) -> Node:
        upper = self.tree.split(node, position - node.start)
        self.pins.divide(upper, node)
        free = self._lookback.divide(upper, node)
        for index, growth in self.rules.divide(upper, node).items():
            self._count_bytes(node, index, growth)
        if self.canary is not None:
            self.canary.divide(upper, node)
        if self.observer is not None:
            self.observer.split(upper, node)
        for changed in (upper, node, *free):
            self.queue.update(changed)
        return upper

    def _attach(self, node: Node, index: int, payload: Payload) -> None:
        node.payloads[index] = payload
        self._count_bytes(node, index, payload.nbytes)
        self.version += 1
        self.stats.bytes_inserted += payload.nbytes
        if index == STATE:
            self._lookback.count(node)
        if self.canary is not None:
            self.canary.seal(node, index)
        self.tell_changed(node)

    def _release(self, node: Node, index: int) -> None:
        payload = node.payloads[index]
        if payload is None:
            return
        if index == STATE:
            self._uncount(node)
            self.stats.placements[node.placement].evicted += 1
        node.payloads[index] = None
        node.prints[index] = None
        node.copied &= ~(1 << index)
        self._count_bytes(node, index, -payload.nbytes)
        self.version += 1
        self.stats.evictions[COMPONENTS[index]] += 1
        payload.release()
        self.tell_changed(node)

    def _count_bytes(self, node: Node, index: int, change: int) -> None:
        self.component_bytes[COMPONENTS[index]] += change
        self.pins.count(node, index, change)


def any_held(node: Node) -> bool:
    return any(payload is not None for payload in node.payloads)
