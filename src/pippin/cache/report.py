"""The cache's state as plain JSON values. Changes nothing."""

from __future__ import annotations

from dataclasses import asdict

from pippin.cache.tree.components import STATE
from pippin.cache.tree.payload_tree import PayloadTree
from pippin.cache.tree.radix import Node

NUM_SHOWN_TOKENS = 8


def counters(tree: PayloadTree) -> dict[str, object]:
    """Sizes, and what `CacheStats` counts."""
    stats = asdict(tree.stats)
    evictions, placements = stats.pop("evictions"), stats.pop("placements")
    return {
        "nodes": tree.radix.num_nodes,
        "tokens": tree.radix.num_tokens,
        "nbytes": tree.nbytes,
        "evictable_bytes": tree.evictable_bytes,
        "component_bytes": {kind.value: n for kind, n in tree.component_bytes.items()},
        **stats,
        "hit_rate": tree.stats.hit_rate,
        "evictions": {kind.value: n for kind, n in evictions.items()},
        "checkpoints": {kind.value: made for kind, made in placements.items()},
    }


def recent_paths(tree: PayloadTree) -> list[dict[str, object]]:
    """The most recently used ones."""
    return [_describe(end) for end in tree.recent if end.attached]


def _describe(end: Node) -> dict[str, object]:
    path = list(end.ancestors())
    return {
        "tokens": end.end,
        "nodes": len(path),
        "nbytes": sum(node.nbytes for node in path),
        "checkpoints": sum(node.payloads[STATE] is not None for node in path),
        "first_tokens": path[-1].token_ids[:NUM_SHOWN_TOKENS].tolist(),
        "last_tokens": end.token_ids[-NUM_SHOWN_TOKENS:].tolist(),
        "locked": end.path_locks > 0,
    }
