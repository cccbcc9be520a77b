"""The nodes of the prefix tree that watchers know, and what has changed of them."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tree.components import COMPONENTS
from pippin.cache.tree.payload_tree import TreeObserver
from pippin.cache.tree.radix import Node
from pippin.engine.events.schema import Change, NodeEvent, TreeEvent

_Method = TypeVar("_Method", bound=Callable[..., None])


def never_raises(method: _Method) -> _Method:
    """For methods that the engine calls while it plans and commits: `give_up` is called instead."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as error:
            self.give_up(error)

    return cast(_Method, guarded)


MAX_NODES = 512
NUM_KEPT = MAX_NODES * 3 // 4  # when there are more than that


class TreeMirror(TreeObserver):
    """An observer of the cache from its making until `close`."""

    def __init__(
        self,
        cache: PrefixCache,
        on_failure: Callable[[Exception], None],
        tier_below: Literal["host", "disk"] = "disk",
    ) -> None:
        """`tier_below`: the tier whose copies the cache marks."""
        self._cache = cache
        self._tier_below = tier_below
        self.give_up = on_failure
        self.shown = {node.id: node for node in _used_last(cache.radix.root)}  # that watchers know
        self._changes: dict[int, Change] = {}
        self._evicted: list[int] = []
        self._used: dict[int, None] = {}  # in order
        self._locked: list[int] = []
        cache.observers += (self,)

    def close(self) -> None:
        cache = self._cache
        cache.observers = tuple(one for one in cache.observers if one is not self)

    def snapshot(self) -> TreeEvent:
        """All nodes that watchers should know, after `changes` has returned what was new."""
        nodes = sorted(self.shown.values(), key=lambda node: node.start)
        return self._event([self._view(node, "show") for node in nodes], [], [], [])

    def changes(self) -> TreeEvent | None:
        """What is new since the last call, if anything is."""
        hidden = self._hide() if len(self.shown) > MAX_NODES else []
        locked = sorted(node.id for node in self._cache.locked_ends if node.id in self.shown)
        nothing_new = not (self._changes or self._evicted or hidden or self._used)
        if nothing_new and locked == self._locked:
            return None
        nodes = sorted((self.shown[id] for id in self._changes), key=lambda node: node.start)
        changed = [self._view(node, self._changes[node.id]) for node in nodes]
        used = [id for id in self._used if id in self.shown]
        tree = self._event(changed, self._evicted, hidden, used)
        self._changes, self._evicted, self._used = {}, [], {}
        self._locked = locked
        return tree

    # ---- the cache's observer ------------------------------------------------------------------

    @never_raises
    def added(self, node: Node) -> None:
        self._show(node, "add")
        assert node.parent is not None
        self._show_path(node.parent)
        self.changed(node.parent)

    @never_raises
    def split(self, upper: Node, lower: Node) -> None:
        if lower.id in self.shown:
            self._show(upper, "split")
            self.changed(lower)

    @never_raises
    def changed(self, node: Node) -> None:
        if node.id in self.shown:
            self._changes.setdefault(node.id, "change")

    @never_raises
    def removed(self, leaf: Node, parent: Node) -> None:
        if self._forget(leaf.id):
            self._evicted.append(leaf.id)
        self._used.pop(leaf.id, None)
        self.changed(parent)

    @never_raises
    def used(self, node: Node) -> None:
        self._show_path(node)
        self._used.pop(node.id, None)
        self._used[node.id] = None

    # --------------------------------------------------------------------------------------------

    def _show(self, node: Node, why: Change) -> None:
        self.shown[node.id] = node
        self._changes[node.id] = why

    def _show_path(self, node: Node) -> None:
        for above in node.ancestors():
            if above.id in self.shown:
                break  # and so is all above it
            self._show(above, "show")

    def _forget(self, id: int) -> bool:
        """Whether watchers knew it."""
        if self.shown.pop(id, None) is None:
            return False
        return self._changes.pop(id, "change") == "change"

    def _hide(self) -> list[int]:
        """Remove the least recently used ones."""
        kept = {node.id for node in _used_last(self._cache.radix.root, NUM_KEPT)}
        return [id for id in list(self.shown) if id not in kept and self._forget(id)]

    def _event(
        self, nodes: list[NodeEvent], evicted: list[int], hidden: list[int], used: list[int]
    ) -> TreeEvent:
        cache = self._cache
        return TreeEvent(
            nodes=nodes,
            evicted=evicted,
            hidden=hidden,
            used=used,
            locked=sorted(node.id for node in cache.locked_ends if node.id in self.shown),
            tick=cache.tick,
            num_nodes=cache.radix.num_nodes,
            num_tokens=cache.radix.num_tokens,
            num_roots=len(cache.radix.root.children),
        )

    def _view(self, node: Node, why: Change) -> NodeEvent:
        held = zip(COMPONENTS, node.payloads, strict=True)
        return NodeEvent(
            id=node.id,
            parent=0 if node.parent is None else node.parent.id,
            start=node.start,
            tokens=node.num_tokens,
            children=len(node.children),
            bytes={kind.value: payload.nbytes for kind, payload in held if payload is not None},
            tier=self._tier_below if _is_copied(node) else "device",
            hits=node.hits,
            used=node.stamp[1],
            change=why,
        )


def _used_last(root: Node, limit: int = MAX_NODES) -> list[Node]:
    """Parents before children; a parent was used whenever its child was."""
    found: list[Node] = []
    heap = [(-node.stamp[1], node.id, node) for node in root.children.values()]
    heapq.heapify(heap)
    while heap and len(found) < limit:
        node = heapq.heappop(heap)[2]
        found.append(node)
        for child in node.children.values():
            heapq.heappush(heap, (-child.stamp[1], child.id, child))
    return found


def _is_copied(node: Node) -> bool:
    """Whether the tier below has a copy of all its payloads."""
    held = [index for index, payload in enumerate(node.payloads) if payload is not None]
    return bool(held) and all(node.copied >> index & 1 for index in held)
