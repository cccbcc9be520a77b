"""check_integrity must be able to fail: each kind of damage is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from naive_cache import A, CheckedCache, S, W

from cases import cases
from integrity import check_integrity
from pippin.cache.tree.payload_tree import PayloadTree
from pippin.cache.tree.radix import Node


def add(what: object, name: str) -> None:
    setattr(what, name, getattr(what, name) + 1)


def look_back_too_little(tree: PayloadTree, node: Node) -> None:
    assert node.parent is not None
    node.window_floor = node.start
    node.parent.window_users -= 1


def misfile(tree: PayloadTree, node: Node) -> None:
    assert node.parent is not None
    node.parent.children[99] = node.parent.children.pop(int(node.token_ids[0]))


DAMAGE: dict[str, Callable[[PayloadTree, Node], object]] = {
    "bytes": lambda tree, node: tree.component_bytes.update({A: 1}),
    "lacks attention": lambda tree, node: node.payloads.__setitem__(0, None),
    "follows a node that ends": lambda tree, node: add(node, "start"),
    "filed wrongly": misfile,
    "1 locks": lambda tree, node: add(node, "locks"),
    "window locks": lambda tree, node: add(node, "window_locks"),
    "path locks": lambda tree, node: add(node, "path_locks"),
    "locked bytes": lambda tree, node: add(tree.locks, "nbytes"),
    "window users": lambda tree, node: add(node, "window_users"),
    "looks back further": look_back_too_little,
    "can never be evicted": lambda tree, node: [h.put(node, None) for h in tree.queue._heaps],
    "never freed": lambda tree, node: add(tree.radix, "epoch"),
    "no longer in the tree": lambda tree, node: tree.queue._heaps[0].put(
        Node(b"", 0, None), (0.0, 0)
    ),
}


@cases("message", DAMAGE)
def test_damage_is_named(message: str) -> None:
    checked = CheckedCache([A, W, S], window=3)
    checked.insert([1, 2, 3, 4], 0, states=[2, 4])
    check_integrity(checked.cache)
    leaf = next(node for node in checked.cache.radix.nodes() if not node.children)
    DAMAGE[message](checked.cache, leaf)
    with pytest.raises(AssertionError, match=message):
        check_integrity(checked.cache)
