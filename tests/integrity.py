"""Counts all that a cache, or a tier, has again, and compares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tiers.cache_tier import CacheTier
from pippin.cache.tiers.tier_io import EntryPart, Owned
from pippin.cache.tree.canary import hash_to_end
from pippin.cache.tree.components import ATTENTION, COMPONENTS, HIDDEN, STATE
from pippin.cache.tree.payload_tree import PayloadTree
from pippin.cache.tree.radix import Node


def check_tier(tier: CacheTier) -> None:
    check_integrity(tier.memory)
    check_integrity(tier.cache)
    live: Counter[Owned] = Counter()
    for node in tier.cache.radix.nodes():
        for payload in node.payloads:
            if payload is not None:
                assert isinstance(payload, EntryPart)
                live[payload.owner] += payload.num_tokens
                assert payload.node is node, "a part does not know its node"
    owned = {owner: sum(part.num_tokens for part in owner.parts) for owner in live}
    assert live == owned, "entries of a tier and parts in its tree do not add up"
    named = set(tier._owned.values())
    assert named <= live.keys(), "the tree names an entry of which it has nothing"
    assert all(map(tier._is_flushed, live.keys() - named)), "an entry is named twice"
    assert tier._lost.keys() <= tier._owned.keys(), "what is not in the tree is kept as lost"


def sweep(cache: PrefixCache) -> int:
    """Have the canary check every node; returns the faults found."""
    canary = cache.canary
    assert canary is not None
    before = canary.faults
    for node in cache.radix.nodes():
        canary.passed(node, canary.fault(node, hash_to_end(node)))
    return canary.faults - before


def check_integrity(cache: PrefixCache) -> None:
    """Links, payloads, locks, bytes and the eviction queue agree. Visits every node."""
    tree = cache
    nodes = list(tree.radix.nodes())
    for node in nodes:
        _check_links(node)
        _check_payloads(tree, node)
    _check_flushed(tree, nodes)
    _check_queue(tree, nodes)
    _check_locks(tree, nodes, [(lock.node, lock.floor) for lock in cache._locks])
    _check_window_users(tree, nodes)
    _check_totals(tree, nodes)
    damaged = sum(node.damaged.bit_count() for node in nodes)
    assert tree.num_damaged == damaged, f"{tree.num_damaged} damaged payloads, found {damaged}"


def _check_links(node: Node) -> None:
    parent = node.parent
    assert parent is not None, f"{_name(node)} is in the tree without a parent"
    assert node.num_tokens > 0, f"{_name(node)} holds no tokens"
    first = node.key[1] if parent.is_root and isinstance(node.key, tuple) else node.key
    was_moved = node.key == (b"", node.id)  # by a node that was added after a flush
    filed = was_moved or first == int(node.token_ids[0])
    filed = filed and parent.children.get(node.key) is node
    assert filed, f"{_name(node)} is filed wrongly"
    assert node.start == parent.end, f"{_name(node)} follows a node that ends at {parent.end}"
    assert len(node.token_ids) == node.num_tokens, f"{_name(node)} has {len(node.token_ids)} tokens"


def _check_payloads(tree: PayloadTree, node: Node) -> None:
    for index, component in enumerate(COMPONENTS):
        payload = node.payloads[index]
        if payload is None:
            continue
        assert index in tree.rules.indices, f"{_name(node)} carries a stray {component.value}"
        if component.divides:
            assert payload.num_tokens == node.num_tokens, (
                f"{_name(node)}: its {component.value} covers {payload.num_tokens} tokens"
            )
    if tree.rules.has_attention:
        assert node.payloads[ATTENTION] is not None, f"{_name(node)} lacks attention KV"
    if tree.rules.has_state and node.payloads[HIDDEN] is not None:
        assert node.payloads[STATE] is not None, f"{_name(node)} keeps a hidden vector alone"
    assert node.children or node.locks or node.carries_payload, f"{_name(node)} is an empty leaf"


def _check_flushed(tree: PayloadTree, nodes: list[Node]) -> None:
    """What was flushed is not locked, has nothing newer below it, and will be freed."""
    found = set(tree._flushed)
    for node in nodes:
        assert node.parent is not None
        if node.epoch == tree.radix.epoch:
            assert node.parent not in found, f"{_name(node)} is below what was flushed"
            assert node.key != (b"", node.id), f"{_name(node)} is filed as what was flushed"
        else:
            assert not node.path_locks, f"{_name(node)} was flushed and is locked"
            assert node in found or node.parent in found, f"{_name(node)} is never freed"
            found.add(node)


def _check_queue(tree: PayloadTree, nodes: list[Node]) -> None:
    for node in nodes:
        assert tree.queue.is_queued(node), f"{_name(node)}: something of it can never be evicted"
    num_entries = sum(map(tree.queue.num_entries, nodes))
    assert len(tree.queue) == num_entries, "the queue holds nodes that are no longer in the tree"


def _check_locks(tree: PayloadTree, nodes: list[Node], locks: Iterable[tuple[Node, int]]) -> None:
    ends: Counter[Node] = Counter()
    window_locks: Counter[Node] = Counter()
    locked: set[Node] = set()
    for node, floor in locks:
        assert node.attached, f"{_name(node)} is locked but no longer in the tree"
        if not node.is_root:
            ends[node] += 1
            window_locks.update(node.back_to(floor))
            locked.update(node.ancestors())
    locked_bytes = 0
    for node in nodes:
        assert node.locks == ends[node], f"{_name(node)}: {node.locks} locks, saw {ends[node]}"
        assert node.window_locks == window_locks[node], (
            f"{_name(node)}: {node.window_locks} window locks, saw {window_locks[node]}"
        )
        path_locks = ends[node] + sum(child in locked for child in node.children.values())
        assert node.path_locks == path_locks, (
            f"{_name(node)}: {node.path_locks} path locks, saw {path_locks}"
        )
        hidden = node.locks if tree.rules.has_state else path_locks
        kept_by = (path_locks, node.window_locks, node.locks, hidden)
        for kept, payload in zip(kept_by, node.payloads, strict=True):
            locked_bytes += payload.nbytes if kept and payload is not None else 0
    assert tree.locks.nbytes == locked_bytes, (
        f"{tree.locks.nbytes} locked bytes, saw {locked_bytes}"
    )


def _check_window_users(tree: PayloadTree, nodes: list[Node]) -> None:
    users: Counter[Node] = Counter()
    if tree.rules.has_window:
        for end in filter(tree.rules.is_end, nodes):
            users.update(end.back_to(end.window_floor))
            assert end.window_floor <= max(0, end.end - tree.rules.window), (
                f"{_name(end)} looks back further than to {end.window_floor}"
            )
    for node in nodes:
        assert node.window_users == users[node], (
            f"{_name(node)}: {node.window_users} window users, saw {users[node]}"
        )


def _check_totals(tree: PayloadTree, nodes: list[Node]) -> None:
    assert tree.radix.num_nodes == len(nodes), f"{tree.radix.num_nodes} nodes, saw {len(nodes)}"
    num_tokens = sum(node.num_tokens for node in nodes)
    assert tree.radix.num_tokens == num_tokens, f"{tree.radix.num_tokens} tokens, saw {num_tokens}"
    seen: set[int] = set()
    held = dict.fromkeys(tree.rules.components, 0)
    for node in nodes:
        for component, payload in zip(COMPONENTS, node.payloads, strict=True):
            if payload is not None:
                assert id(payload) not in seen, f"{_name(node)} shares a {component.value} payload"
                seen.add(id(payload))
                held[component] += payload.nbytes
    assert tree.component_bytes == held, f"bytes {tree.component_bytes}, saw {held}"


def _name(node: Node) -> str:
    return f"node [{node.start}, {node.end})"
