"""Payloads that are not what they were: matched by nobody, and dropped when no lock holds them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from pippin.cache.tree.canary import Canary
from pippin.cache.tree.components import INDEX
from pippin.cache.tree.payload_tree import PayloadTree
from pippin.cache.tree.radix import Node
from pippin.types import Component

logger = logging.getLogger(__name__)


class Condemned:
    def __init__(self, store: PayloadTree, canary: Canary | None) -> None:
        self._store = store
        self._canary = canary

    def sound_reach(self, path: Sequence[Node], reach: int) -> int:
        """How far along `path` damage begins, `reach` at the most."""
        if self._store.num_damaged:
            reach = min([reach, *(node.start for node in path if node.damaged)])
        return reach

    def condemn(self, path: Sequence[Node], end: int, component: Component, start: int) -> None:
        """KV of [start, end) along `path`, or what is kept after `end`."""
        divides = component in (Component.ATTENTION, Component.WINDOW)
        nodes = [node for node in path if (node.end > start if divides else node.end == end)]
        for node in nodes:
            self._store.mark_damaged(node, INDEX[component])
        self.drop(nodes)
        where = f"over tokens [{start}, {end})" if divides else f"after token {end}"
        fault = f"cache entry {where} holds {component.value} bytes that have changed"
        if self._canary is None:
            logger.error(fault)
        else:
            self._canary.report(fault)

    def drop(self, nodes: Iterable[Node]) -> None:
        """What is damaged of these, as far as no lock holds it."""
        if not self._store.num_damaged:
            return
        for node in list(nodes):
            for component in self._store.rules.components:
                if node.attached and node.damaged >> INDEX[component] & 1:
                    self._store.discard(node, component)
