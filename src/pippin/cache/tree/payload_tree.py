"""The radix tree with its payloads: every change to them, and the count of their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from pippin.cache.policy import CacheStats, Placement
from pippin.cache.tree.canary import Canary
from pippin.cache.tree.components import (
    COMPONENTS,
    HIDDEN,
    INDEX,
    STATE,
    WINDOW,
    Locks,
    Lookback,
    Rules,
)
from pippin.cache.tree.eviction import NEVER, EvictionQueue, Unit
from pippin.cache.tree.radix import Node, RadixTree, TokenArray
from pippin.types import GRID, Component, Payload


class TreeObserver:
    """Called during a change, after it has happened; never raises. Does nothing by default.

    Nodes may be kept until `removed` names them.
    """

    def added(self, node: Node) -> None: ...

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` is new, and has the first tokens of `lower`."""

    def changed(self, node: Node) -> None:
        """A payload was attached or released, or a match ended there."""

    def removed(self, leaf: Node, parent: Node) -> None:
        """`parent` is the one that it had."""

    def flushed(self, kept: Sequence[Node]) -> None:
        """No match reaches any other node now, parents first; `removed` names those in time."""

    def used(self, node: Node) -> None:
        """The path that ends there."""


NUM_RECENT = 5  # paths

Filled = list[tuple[Node, int]]  # nodes and the component index that was attached to them


class PayloadTree:
    """Owns every payload in the tree and releases each exactly once."""

    def __init__(self, rules: Rules, canary: Canary | None, *, evicts: bool) -> None:
        self.rules = rules
        self.canary = canary
        self.radix = RadixTree()
        self.locks = Locks(rules)
        self.queue = EvictionQueue(rules, evicts=evicts)
        self.stats = CacheStats()
        self.component_bytes = dict.fromkeys(rules.components, 0)
        self.version = 0  # changes whenever a match of some prompt may change
        self.num_damaged = 0  # damaged payloads that are locked
        self.tick = 0
        self.recent: list[Node] = []  # ends of the paths used last; some may be evicted
        self.observers: tuple[TreeObserver, ...] = ()
        self._lookback = Lookback(rules)
        self._flushed: list[Node] = []  # subtrees to free, from the last on; some may be gone

    @property
    def nbytes(self) -> int:
        return sum(self.component_bytes.values())

    @property
    def evictable_bytes(self) -> int:
        return self.nbytes - self.locks.nbytes

    @property
    def flushing(self) -> bool:
        """Whether something that was flushed has not been freed yet."""
        return bool(self._flushed)

    def touch(self, node: Node) -> int:
        """Mark the path to `node` as used now; returns the tick."""
        self.tick += 1
        stamp = (self.queue.level, self.tick)
        for above in node.ancestors():
            above.stamp = stamp
        if not node.is_root:
            others = [end for end in self.recent if end.stamp is not stamp]  # not on this path
            self.recent = [node, *others][:NUM_RECENT]
            for observer in self.observers:
                observer.used(node)
        return self.tick

    def unlock_node(self, node: Node, floor: int) -> None:
        """Undo `locks.lock`, which returned `floor`; what is empty now leaves the tree."""
        for free in self.locks.unlock(node, floor):
            if free.attached:  # or else pruned with the one before it
                self.prune(free)

    def end_node(self, node: Node, position: int) -> Node:
        """The node on the path to `node` that ends at `position`, split off if need be."""
        while node.start >= position and not node.is_root:
            assert node.parent is not None
            node = node.parent
        return node if node.end == position else self.split(node, position)

    def split(self, node: Node, position: int) -> Node:
        """A new node takes the tokens of `node` before `position`; returns it."""
        upper = self.radix.split(node, position - node.start)
        self.locks.divide(upper, node)
        free = self._lookback.divide(upper, node)
        for index, growth in self.rules.divide(upper, node).items():
            self._count_bytes(node, index, growth)
        self.num_damaged += upper.damaged.bit_count()
        if self.canary is not None:
            self.canary.divide(upper, node)
        for observer in self.observers:
            observer.split(upper, node)
        for changed in (upper, node, *free):
            self.queue.update(changed)
        return upper

    def grow(
        self,
        path: list[Node],
        reach: int,
        ids: TokenArray,
        salt: bytes = b"",
        cuts: Iterable[int] = (),
    ) -> Node:
        """The node that ends with `ids`, whose first `reach` tokens already lie along `path`.

        What is new of the path is one node, or several that end at the `cuts`.
        """
        parent = node = self.end_node(path[-1] if path else self.radix.root, reach)
        if reach == len(ids):
            return node
        was_leaf = not parent.children
        for end in sorted({*(cut for cut in cuts if reach < cut < len(ids)), len(ids)}):
            node = self.radix.append(node, ids[node.end : end], salt)
            if self.canary is not None:
                self.canary.mark(node)
            for observer in self.observers:
                observer.added(node)
        self.stats.tokens_inserted += len(ids) - reach
        if not self.rules.has_state:
            self._lookback.count(node)
            if was_leaf:
                self._uncount(parent)
        self.queue.update(parent)  # no leaf any more: its window and state are units of their own
        return node

    def attach(self, node: Node, index: int, payload: Payload) -> None:
        """Own a payload from now on; the caller updates the queue after its last one."""
        node.payloads[index] = payload
        self._count_bytes(node, index, payload.nbytes)
        self.version += 1
        self.stats.bytes_inserted += payload.nbytes
        if index == STATE:
            self._lookback.count(node)
        if self.canary is not None:
            self.canary.seal(node, index)
        self.notify_changed(node)

    def mark_node_copied(self, node: Node, index: int) -> None:
        """The tier below has this payload too: it costs less to evict."""
        if node.payloads[index] is not None:
            node.copied |= 1 << index
            self.queue.update(node)
            self.notify_changed(node)

    def mark_damaged(self, node: Node, index: int) -> None:
        """The bytes of a payload changed: no match reaches beyond it while it is there."""
        if node.payloads[index] is not None and not node.damaged >> index & 1:
            node.damaged |= 1 << index
            self.num_damaged += 1
            self.version += 1
            self.stats.damaged += 1

    def refuse(self, *payloads: Payload) -> None:
        """Release payloads of an insert that the tree already has or cannot connect."""
        for payload in payloads:
            self.stats.bytes_duplicate += payload.nbytes
            payload.release()

    def prune(self, node: Node) -> None:
        """After a change: remove leaves that carry nothing, update the queue for the rest."""
        while not (node.is_root or node.children or node.locks) and not node.carries_payload:
            node = self._cut_off(node)
        self.queue.update(node)

    def drop_damaged(self, nodes: Iterable[Node]) -> None:
        """Drop what is damaged of these nodes and not locked."""
        if not self.num_damaged:
            return
        for node in list(nodes):
            for component in self.rules.components:
                if node.attached and node.damaged >> INDEX[component] & 1:
                    self.discard(node, component)

    def notify_changed(self, node: Node) -> None:
        for observer in self.observers:
            observer.changed(node)

    def evict(self, nbytes: int, *, spare_since: int = NEVER) -> int:
        """Free `nbytes`, or all that can be, except what was used since a tick; returns bytes.

        What was flushed is freed first.
        """
        before = self.nbytes
        while before - self.nbytes < nbytes and self.free_flushed(1):
            pass
        freed = before - self.nbytes
        return freed + self.queue.evict(nbytes - freed, self.take, spare_since=spare_since)

    def keep_within(self, capacity_bytes: int, tick: int, filled: Filled) -> None:
        """Evict what was last used before `tick`, then the least of what was just filled."""
        self.evict(self.nbytes - capacity_bytes, spare_since=tick)
        self.evict(self.nbytes - capacity_bytes)
        for node, index in filled:
            if self.nbytes <= capacity_bytes:
                break
            # Only fills of locked nodes are left; no match has returned these bytes yet.
            if node.attached and index in (WINDOW, STATE, HIDDEN):
                self.drop(node, index)

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
        """No match returns what is not locked any more; `free_flushed` frees it.

        Locked paths move into the next epoch. Where they fork, the other subtrees stay behind.
        """
        before = self.radix.epoch
        self.radix.epoch += 1
        self.version += 1
        kept: list[Node] = []
        flushed: list[Node] = []
        stack = [self.radix.root]
        while stack:
            for child in stack.pop().children.values():
                if child.path_locks:
                    child.epoch = self.radix.epoch
                    kept.append(child)
                    stack.append(child)
                elif child.epoch == before:
                    flushed.append(child)
        self._flushed += flushed
        for observer in self.observers:
            observer.flushed(kept)
        for node in kept:
            for index in range(len(COMPONENTS)):
                if not self.locks.is_locked(node, index):
                    self._release(node, index)
            self.queue.update(node)
        self.recent = [end for end in self.recent if end.epoch == self.radix.epoch]

    def free_flushed(self, num_nodes: int) -> int:
        """Remove at most `num_nodes` of what was flushed, leaves first; returns how many."""
        stack, removed = self._flushed, 0
        while stack and removed < num_nodes:
            node = stack[-1]
            if node.children:
                stack.extend(node.children.values())
                continue
            stack.pop()
            if node.attached:  # or else pruned with its last child
                self.remove(node)
                removed += 1
        return removed

    def remove(self, leaf: Node) -> None:
        """Remove a leaf with all it carries, and the nodes above that are empty then."""
        for index in range(len(COMPONENTS)):
            self._release(leaf, index)
        self.prune(self._cut_off(leaf))

    def discard(self, node: Node, component: Component, limit: int | None = None) -> int:
        """Drop a component of a node, and with attention KV all below it; returns how many nodes
        changed: 0 if it is locked, and no more than `limit`, leaves first."""
        index = INDEX[component]
        if self.locks.is_locked(node, index):
            return 0
        if component is not Component.ATTENTION:
            self.drop(node, index)
            return 1
        leaves_first = list(islice(node.leaves_first(), limit))
        for below in leaves_first:
            if below.attached:  # or else pruned with its last child
                self.remove(below)
        return len(leaves_first)

    def drop(self, node: Node, index: int) -> None:
        """Release one component; the node stays."""
        self._release(node, index)
        if index == STATE:
            self._release(node, HIDDEN)  # it is restored with the state alone
        self.prune(node)

    def _cut_off(self, leaf: Node) -> Node:
        """Remove a leaf that carries nothing; returns its parent."""
        parent = leaf.parent
        assert parent is not None
        if not self.rules.has_state:
            if len(parent.children) == 1:
                self._lookback.count(parent)  # first, so that few counts fall to zero in between
            self._uncount(leaf)
        self.radix.remove(leaf)
        for observer in self.observers:
            observer.removed(leaf, parent)
        self.queue.update(leaf)
        return parent

    def _uncount(self, end: Node) -> None:
        for free in self._lookback.uncount(end, end):
            self.queue.update(free)

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
        if node.damaged >> index & 1:
            node.damaged &= ~(1 << index)
            self.num_damaged -= 1
        self._count_bytes(node, index, -payload.nbytes)
        self.version += 1
        self.stats.evictions[COMPONENTS[index]] += 1
        payload.release()
        self.notify_changed(node)

    def _count_bytes(self, node: Node, index: int, change: int) -> None:
        self.component_bytes[COMPONENTS[index]] += change
        self.locks.count(node, index, change)

    # ---- what an insert brings -------------------------------------------------------------

    def fill(
        self,
        tip: Node,
        start: int,
        end: int,
        kv: Mapping[Component, Payload],
        states: Mapping[int, Payload],
        hidden: Payload | None,
        placements: Mapping[int, Placement],
    ) -> Filled:
        """Give KV of [start, end), states at positions along it and the hidden vector at `end` to
        the nodes on the path to `tip` that lack them; releases the rest."""
        filled = self._add_states(tip, states, placements)
        for component, payload in kv.items():
            filled += self._add_kv(tip, INDEX[component], start, payload)
        for node in dict.fromkeys(node for node, _ in filled):
            self.queue.update(node)
        self.prune(tip)
        if hidden is None:
            return filled
        # It is kept where it could be restored to sample.
        restorable = not self.rules.has_state or tip.payloads[STATE] is not None
        if tip.end != end or not restorable or tip.payloads[HIDDEN] is not None:
            self.refuse(hidden)
            return filled
        self.attach(tip, HIDDEN, hidden)
        self.queue.update(tip)
        return [*filled, (tip, HIDDEN)]

    def _add_states(
        self, tip: Node, states: Mapping[int, Payload], placements: Mapping[int, Placement]
    ) -> Filled:
        """Attach states to the ends of nodes along the path to `tip`."""
        filled: Filled = []
        node = tip
        for position in sorted(states, reverse=True):
            state = states[position]
            if position > tip.end:
                self.refuse(state)
                continue
            node = self.end_node(node, position)
            if node.payloads[STATE] is not None:
                self.refuse(state)
                continue
            default = Placement.REPLY_END if position % GRID else Placement.GRID
            node.placement = placements.get(position, default)
            node.state_uses = 0
            self.stats.placements[node.placement].placed += 1
            self.attach(node, STATE, state)
            filled.append((node, STATE))
        return filled

    def _add_kv(self, tip: Node, index: int, start: int, payload: Payload) -> Filled:
        """Give a payload that covers [start, ...) to the nodes up to `tip` that lack it.

        From the tip upwards, pieces are cut off the end of what is left:

            payload:  [ rest ............ | piece | already in the tree: refused ]
            nodes:    [ parent ]  ...     [ node ]
        """
        filled: Filled = []
        rest: Payload | None = payload
        for node in list(tip.back_to(start)):
            if node.payloads[index] is not None:
                continue
            if node.start < start:
                self.split(node, start)  # `node` is now the part from `start` on
            assert rest is not None
            if node.end - start < rest.num_tokens:
                rest, cached_already = rest.split(node.end - start)
                self.refuse(cached_already)
            head = None
            if node.start > start:
                head, rest = rest.split(node.start - start)
            self.attach(node, index, rest)
            filled.append((node, index))
            rest = head
            if rest is None:
                break
        if rest is not None:
            self.refuse(rest)
        return filled
