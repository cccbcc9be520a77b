"""The cache's state as plain values, for people to look at. Changes nothing."""

from __future__ import annotations

from dataclasses import asdict

from pippin.cache.tree.components import STATE
from pippin.cache.tree.payload_tree import PayloadTree
from pippin.cache.tree.radix import Node

NUM_SHOWN_TOKENS = 8


def counters(store: PayloadTree, *, capacity_bytes: int, num_locks: int) -> dict[str, object]:
    """What is held and what it was good for, as numbers that are kept anyway."""
    stats = store.stats
    return {
        "nodes": store.tree.num_nodes,
        "tokens": store.tree.num_tokens,
        "nbytes": store.nbytes,
        "evictable_bytes": store.evictable_bytes,
        "capacity_bytes": capacity_bytes,
        "locks": num_locks,
        "component_bytes": {c.value: store.component_bytes[c] for c in store.rules.components},
        "lookups": stats.lookups,
        "hits": stats.hits,
        "whole_hits": stats.whole_hits,
        "hit_rate": stats.hit_rate,
        "tokens_looked_up": stats.tokens_looked_up,
        "tokens_matched": stats.tokens_matched,
        "tokens_inserted": stats.tokens_inserted,
        "gaps": stats.gaps,
        "bytes_inserted": stats.bytes_inserted,
        "bytes_duplicate": stats.bytes_duplicate,
        "bytes_evicted": stats.bytes_evicted,
        "damaged": stats.damaged,
        "evictions": {component.value: count for component, count in stats.evictions.items()},
        "checkpoints": {kind.value: asdict(made) for kind, made in stats.placements.items()},
    }


def recent_paths(store: PayloadTree) -> list[dict[str, object]]:
    """The most recently used ones."""
    return [_describe(end) for end in store.recent if end.attached]


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
