"""check_integrity must be able to fail: each kind of damage is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from naive_cache import A, CheckedCache, S, W

from cases import cases
from pippin.cache.tree.radix import Node


def leak_bytes(checked: CheckedCache, node: Node) -> None:
    checked.cache.tree.component_bytes[A] += 1


def lose_attention(checked: CheckedCache, node: Node) -> None:
    node.payloads[0] = None


def shift(checked: CheckedCache, node: Node) -> None:
    node.start += 1


def misfile(checked: CheckedCache, node: Node) -> None:
    assert node.parent is not None
    node.parent.children[99] = node.parent.children.pop(int(node.token_ids[0]))


def lock(checked: CheckedCache, node: Node) -> None:
    node.locks += 1


def lock_window(checked: CheckedCache, node: Node) -> None:
    node.window_locks += 1


def lock_path(checked: CheckedCache, node: Node) -> None:
    node.path_locks += 1


def lock_bytes(checked: CheckedCache, node: Node) -> None:
    checked.cache.tree.locks.nbytes += 1


def look_back(checked: CheckedCache, node: Node) -> None:
    node.window_users += 1


def look_back_too_little(checked: CheckedCache, node: Node) -> None:
    assert node.parent is not None
    node.window_floor = node.start
    node.parent.window_users -= 1


def forget(checked: CheckedCache, node: Node) -> None:
    for heap in checked.cache.tree.queue._heaps:
        heap.discard(node)


def flush(checked: CheckedCache, node: Node) -> None:
    checked.cache.radix.epoch += 1


def remember(checked: CheckedCache, node: Node) -> None:
    checked.cache.tree.queue._heaps[0].put(Node(b"", 0, None), (0.0, 0))


@cases(
    ("damage", "message"),
    [
        (leak_bytes, "bytes"),
        (lose_attention, "lacks attention"),
        (shift, "follows a node that ends"),
        (misfile, "filed wrongly"),
        (lock, "1 locks"),
        (lock_window, "window locks"),
        (lock_path, "path locks"),
        (lock_bytes, "locked bytes"),
        (look_back, "window users"),
        (look_back_too_little, "looks back further"),
        (forget, "can never be evicted"),
        (flush, "never freed"),
        (remember, "no longer in the tree"),
    ],
)
def test_damage_is_named(damage: Callable[[CheckedCache, Node], None], message: str) -> None:
    checked = CheckedCache([A, W, S], window=3)
    checked.insert([1, 2, 3, 4], 0, states=[2, 4])
    checked.cache.check_integrity()
    leaf = next(node for node in checked.cache.radix.nodes() if not node.children)
    damage(checked, leaf)
    with pytest.raises(AssertionError, match=message):
        checked.cache.check_integrity()
