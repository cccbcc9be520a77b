"""What is locked, node by node, and how many bytes that is. Knows no requests and no ranks.

A lock ends at a node. It keeps the attention KV of the path to the root, the window KV that a
restore there needs, and the state at that node:

    attention   node.path_locks > 0    locks that end here, and locked children
    window      node.window_locks > 0  locks whose window segment includes the node
    state       node.locks > 0         locks that end here
    hidden      like the state of its node, or like attention where there are no states

Everything else can be evicted, sooner or later.
"""

from __future__ import annotations

from pippin.cache.tree.components import ATTENTION, HIDDEN, STATE, WINDOW, Rules
from pippin.cache.tree.radix import Node


class Locks:
    def __init__(self, rules: Rules) -> None:
        self.nbytes = 0  # of every locked payload
        self._rules = rules
        # What locks that end at a node keep there, and what those keep that end there or below.
        self._at_end = (STATE, HIDDEN) if rules.has_state else (STATE,)
        self._on_path = (ATTENTION,) if rules.has_state else (ATTENTION, HIDDEN)

    def lock(self, node: Node) -> int:
        """Lock what `Rules.gather` returns; the result is the window segment's start, for `unlock`.

        A path that is locked already is not climbed again, so moving a lock to the end of what was
        added below it costs no more than what was added.
        """
        if node.is_root:
            return node.end
        node.locks += 1
        if node.locks == 1:
            self.nbytes += _nbytes(node, self._at_end)
        for above in node.ancestors():
            above.path_locks += 1
            if above.path_locks > 1:
                break
            self.nbytes += _nbytes(above, self._on_path)
        return self._lock_window(node)

    def unlock(self, node: Node, floor: int) -> list[Node]:
        """Undo `lock`; returns the nodes of which something may be evicted again.

        `floor` was a node's start when locked, and nodes never merge, so splits in between are met.
        """
        if node.is_root:
            return []
        assert node.locks > 0, f"unlocked a node at {node.end} that is not locked"
        node.locks -= 1
        if node.locks == 0:
            self.nbytes -= _nbytes(node, self._at_end)
        for above in node.ancestors():
            above.path_locks -= 1
            if above.path_locks > 0:
                break
            self.nbytes -= _nbytes(above, self._on_path)
        return [node, *self._unlock_window(node, floor)]

    def divide(self, upper: Node, lower: Node) -> None:
        """What locks `lower` locks the node just split off it as well."""
        upper.path_locks = 1 if lower.path_locks else 0
        upper.window_locks = lower.window_locks

    def is_locked(self, node: Node, index: int) -> bool:
        """Whether the component of this index must stay on `node`."""
        if index == WINDOW:
            return node.window_locks > 0
        return (node.locks if index in self._at_end else node.path_locks) > 0

    def count(self, node: Node, index: int, change: int) -> None:
        """A payload of `node` was attached, released or resized."""
        if self.is_locked(node, index):
            self.nbytes += change

    def _lock_window(self, node: Node) -> int:
        floor = node.end
        for above in self._rules.window_segment(node):
            above.window_locks += 1
            if above.window_locks == 1:
                self.nbytes += _nbytes(above, (WINDOW,))
            floor = above.start
        return floor

    def _unlock_window(self, node: Node, floor: int) -> list[Node]:
        free = []
        for above in node.back_to(floor):
            above.window_locks -= 1
            if above.window_locks == 0:
                self.nbytes -= _nbytes(above, (WINDOW,))
                free.append(above)
        return free


def _nbytes(node: Node, indices: tuple[int, ...]) -> int:
    payloads = (node.payloads[index] for index in indices)
    return sum(payload.nbytes for payload in payloads if payload is not None)
