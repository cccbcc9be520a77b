"""Counts, on each node, the ends that look back on its window. Knows no locks and no ranks.

An end is where a match can end: a node with a state, or, in a model without states, a leaf. A
window that no end looks back on may be evicted. Counts change with the ends, along one window, so
that no search of the tree below a node is needed:

    window of 5 tokens          end                    the end's floor is where the first node
    [ 0 .. 3 ] [ 4 .. 7 ] [ 8 .. 9 ]                   starts that counts it: 4
      users 0    users 1    users 1
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from pippin.cache.tree.components import Rules
from pippin.cache.tree.radix import Node

MAX_VISITS = 32  # nodes below a split that are looked at again


class Lookback:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    def count(self, end: Node) -> None:
        """A match can end at `end` from now on."""
        end.window_floor = end.end
        for above in end.back_to(end.end - self._rules.window):
            above.window_users += 1
            end.window_floor = above.start

    def uncount(self, end: Node) -> list[Node]:
        """No match can end there any more; returns the nodes that no end looks back on now."""
        return self._uncount_from(end, end)

    def divide(self, upper: Node, lower: Node) -> list[Node]:
        """Share the users of a node that was split; returns what no end looks back on now.

        Ends that do not reach back to `upper` are taken off it if they are near. Those further
        down stay users of both until they go: too many keep a window longer, never too short.
        """
        upper.window_users = lower.window_users
        free: list[Node] = []
        for end in self._ends_near(lower):
            if end.end - self._rules.window >= upper.end:
                free += self._uncount_from(end, upper)
                end.window_floor = lower.start
        return free

    def _uncount_from(self, end: Node, first: Node) -> list[Node]:
        """Take `end` off the users of `first` and of those above it."""
        free = []
        for above in first.back_to(end.window_floor):
            above.window_users -= 1
            if above.window_users == 0:
                free.append(above)
        return free

    def _ends_near(self, node: Node) -> Iterator[Node]:
        """Ends within the window of this node, itself included, among the first few below it."""
        stack = [node]
        for _ in range(MAX_VISITS):
            if not stack:
                break
            below = stack.pop()
            if below.end - self._rules.window < node.end:
                stack.extend(islice(below.children.values(), MAX_VISITS))
                if self._rules.is_end(below):
                    yield below
