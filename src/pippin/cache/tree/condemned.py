"""Payloads whose bytes have changed: no match reaches beyond them; dropped when not locked."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from pippin.cache.tree.components import INDEX
from pippin.cache.tree.payload_tree import PayloadTree
from pippin.cache.tree.radix import Node
from pippin.types import Component

logger = logging.getLogger(__name__)


def sound_reach(tree: PayloadTree, path: Sequence[Node], reach: int) -> int:
    """How far along `path` damage begins, `reach` at the most."""
    if tree.num_damaged:
        reach = min([reach, *(node.start for node in path if node.damaged)])
    return reach


def condemn(
    tree: PayloadTree, path: Sequence[Node], end: int, component: Component, start: int
) -> None:
    """KV of [start, end) along `path`, or what is kept after `end`."""
    divides = component.divides
    nodes = [node for node in path if (node.end > start if divides else node.end == end)]
    for node in nodes:
        tree.mark_damaged(node, INDEX[component])
    drop_damaged(tree, nodes)
    where = f"over tokens [{start}, {end})" if divides else f"after token {end}"
    fault = f"cache entry {where} holds {component.value} bytes that have changed"
    if tree.canary is None:
        logger.error(fault)
    else:
        tree.canary.report(fault)


def drop_damaged(tree: PayloadTree, nodes: Iterable[Node]) -> None:
    """Drop what is damaged of these nodes and not locked."""
    if not tree.num_damaged:
        return
    for node in list(nodes):
        for component in tree.rules.components:
            if node.attached and node.damaged >> INDEX[component] & 1:
                tree.discard(node, component)
