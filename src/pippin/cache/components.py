"""The rules of attention KV, window KV and recurrent states on tree nodes. Knows no eviction order.

            valid for a match         lock              split                       evict
attention   everywhere                path to the root  divides                     with its leaf
window      its tokens reach back     window segment    divides                     tombstone
state       only at a node's end      that node         stays with the lower part   tombstone
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pippin.cache.radix import Node
from pippin.types import Component, Payload

COMPONENTS = (Component.ATTENTION, Component.WINDOW, Component.STATE)
ATTENTION, WINDOW, STATE = range(3)  # indices into Node.payloads
INDEX = {component: index for index, component in enumerate(COMPONENTS)}

MAX_GAP_NODES = 64  # how far up to look for the next state when weighing one


class Rules:
    """What the components of one model ask of a tree."""

    def __init__(self, components: Sequence[Component], window: int) -> None:
        if not components:
            raise ValueError("components: a model keeps at least one, got none")
        if (Component.WINDOW in components) != (window > 0):
            raise ValueError(f"window: {window} does not go with components {list(components)}")
        self.components = tuple(c for c in COMPONENTS if c in components)
        self.indices = tuple(INDEX[component] for component in self.components)
        self.has_attention = Component.ATTENTION in components
        self.has_window = Component.WINDOW in components
        self.has_state = Component.STATE in components
        self.window = window

    def deepest_valid(self, path: Sequence[Node], reach: int) -> tuple[Node | None, int]:
        """The deepest point at most `reach` tokens down where every component is valid.

        The node is the one that holds the point; without a state rule it may lie inside of it.
        """
        best: Node | None = None
        length = 0
        covered_from = 0  # windows are present, without a hole, from here to the current node
        for node in path:
            if node.start >= reach:
                break
            end = min(node.end, reach)
            if self.has_window and node.payloads[WINDOW] is None:
                covered_from = node.end
                continue
            if self.has_state and (end < node.end or node.payloads[STATE] is None):
                continue
            if covered_from and end - covered_from < self.window:
                continue
            best, length = node, end
        return best, length

    def gather(self, node: Node) -> dict[Component, tuple[Payload, ...]]:
        """What restoring the sequence that ends with `node` needs, in token order."""
        found: dict[Component, tuple[Payload, ...]] = {}
        if node.is_root:
            return found
        if self.has_attention:
            found[Component.ATTENTION] = _held(node.ancestors(), ATTENTION)
        if self.has_window:
            found[Component.WINDOW] = _held(self.segment(node, node.end - self.window), WINDOW)
        if self.has_state:
            found[Component.STATE] = _held([node], STATE)
        return found

    def pin(self, node: Node) -> int:
        """Hold what `gather(node)` returns; the result is the window segment's start, for `unpin`.

        One pin on the last node holds the whole path: only leaves lose their attention KV.
        """
        floor = node.end
        if not node.is_root:
            node.pins += 1
            if self.has_window:
                for above in self.segment(node, node.end - self.window):
                    above.window_pins += 1
                    floor = above.start
        return floor

    def unpin(self, node: Node, floor: int) -> list[Node]:
        """Undo `pin`; returns the nodes that it held.

        `floor` was a node's start when pinned, and nodes never merge, so splits in between are met.
        """
        if node.is_root:
            return []
        assert node.pins > 0, f"unlocked a node at {node.end} that nobody holds"
        node.pins -= 1
        if not self.has_window:
            return [node]
        segment = list(self.segment(node, floor))
        for above in segment:
            above.window_pins -= 1
        return segment

    def count_use(self, node: Node) -> None:
        """A match that ends with `node` was taken: what served it is worth more from now on."""
        if self.has_state:
            node.state_uses += 1
        if self.has_window:
            for above in self.segment(node, node.end - self.window):
                above.window_uses += 1

    def divide(self, upper: Node, lower: Node) -> dict[Component, int]:
        """Share `lower`'s payloads with the node just split off it; returns the change in bytes."""
        upper.window_pins = lower.window_pins
        upper.window_uses = lower.window_uses
        upper.stamp = lower.stamp
        growth: dict[Component, int] = {}
        for index in (ATTENTION, WINDOW):
            payload = lower.payloads[index]
            if payload is not None:
                nbytes = payload.nbytes
                head, tail = payload.split(upper.num_tokens)
                upper.payloads[index], lower.payloads[index] = head, tail
                growth[COMPONENTS[index]] = head.nbytes + tail.nbytes - nbytes
        return growth

    def is_dead(self, leaf: Node) -> bool:
        """No match can end in this leaf: its bytes serve nobody until something is filled in."""
        return (self.has_state and leaf.payloads[STATE] is None) or (
            self.has_window and leaf.payloads[WINDOW] is None
        )

    def supports_leaf(self, node: Node) -> bool:
        """Whether a leaf below ends within the window, and so could not be matched without this."""
        return any(not below.children for below in self._within_window(node))

    def dependants(self, node: Node) -> list[Node]:
        """The nodes, itself and below, whose state cannot be used without this node's window."""
        reached = [node, *self._within_window(node)]
        return [below for below in reached if below.payloads[STATE] is not None]

    def num_saved(self, node: Node) -> int:
        """Tokens computed again if nobody could stop at this node's end, only further up."""
        if not self.has_state:
            return node.num_tokens
        position = 0
        for count, above in enumerate(node.ancestors()):
            if count and (above.payloads[STATE] is not None or count == MAX_GAP_NODES):
                position = above.end
                break
        return node.end - position

    def segment(self, node: Node, low: int) -> Iterator[Node]:
        """`node` and those above it that hold a token at or after position `low`."""
        for above in node.ancestors():
            if above.end <= low:
                break
            yield above

    def _within_window(self, node: Node) -> Iterator[Node]:
        """The nodes below whose end still looks back on `node`."""
        stack = list(node.children.values())
        while stack:
            below = stack.pop()
            if below.end < node.end + self.window:
                yield below
                stack.extend(below.children.values())


def _held(nodes: Iterator[Node] | list[Node], index: int) -> tuple[Payload, ...]:
    payloads = [node.payloads[index] for node in nodes]
    return tuple(payload for payload in reversed(payloads) if payload is not None)
