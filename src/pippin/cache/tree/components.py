"""The rules of what a model keeps, on tree nodes: matches, locks, and ends that look back.

            valid for a match      lock              split                      evict
attention   everywhere             path to the root  divides                    with its leaf
window      its tokens reach back  window segment    divides                    after what needs it
state       only at a node's end   that node         stays with the lower part  on its own
hidden      all of a prompt        that node         stays with the lower part  with state or leaf
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from pippin.cache.tree.radix import Node
from pippin.types import Component, Payload

COMPONENTS = (Component.ATTENTION, Component.WINDOW, Component.STATE, Component.HIDDEN)
ATTENTION, WINDOW, STATE, HIDDEN = range(4)  # indices into Node.payloads
INDEX = {component: index for index, component in enumerate(COMPONENTS)}

MAX_GAP_NODES = 64  # how far up to look for the next state when weighing one


class Rules:
    """What the components of one model ask of a tree."""

    def __init__(self, components: Sequence[Component], window: int) -> None:
        if not set(components) - {Component.HIDDEN}:
            raise ValueError("components: a model keeps at least one of its tokens, got none")
        if (Component.WINDOW in components) != (window > 0):
            raise ValueError(f"window: {window} does not go with components {list(components)}")
        self.components = tuple(c for c in COMPONENTS if c in components)
        self.indices = tuple(INDEX[component] for component in self.components)
        self.has_attention = Component.ATTENTION in components
        self.has_window = Component.WINDOW in components
        self.has_state = Component.STATE in components
        self.has_hidden = Component.HIDDEN in components
        self.window = window

    def deepest_valid(self, path: Sequence[Node], reach: int) -> tuple[Node | None, int]:
        """The deepest point at most `reach` tokens down where every component is valid.

        The node is the one that holds the point; without a state rule it may lie inside of it.
        """
        best: Node | None = None
        length = 0
        for node in reversed(path):
            if node.start >= reach:
                continue
            if self.has_window and node.payloads[WINDOW] is None:
                best = None  # all between this hole and `best` looks back on it too
                continue
            is_end = node.end <= reach and node.payloads[STATE] is not None
            if best is None and (is_end or not self.has_state):
                best, length = node, min(node.end, reach)
            if best is not None and node.start <= max(0, length - self.window):
                return best, length
        return None, 0

    def deepest_for_prompt(
        self, path: Sequence[Node], reach: int, prompt_len: int
    ) -> tuple[Node | None, int]:
        """The same for a prompt of `prompt_len` tokens, after which a token is to be sampled.

        All of it need not be computed only where a hidden vector is kept of its last token.
        """
        node, length = self.deepest_valid(path, reach)
        if node is None or length < prompt_len:
            return node, length
        if node.end == length and node.payloads[HIDDEN] is not None:
            return node, length
        return self.deepest_valid(path, prompt_len - 1)

    def gather(self, node: Node) -> dict[Component, tuple[Payload, ...]]:
        """What restoring the sequence that ends with `node` needs, in token order."""
        found: dict[Component, tuple[Payload, ...]] = {}
        if node.is_root:
            return found
        if self.has_attention:
            found[Component.ATTENTION] = _held(node.ancestors(), ATTENTION)
        if self.has_window:
            found[Component.WINDOW] = _held(node.back_to(node.end - self.window), WINDOW)
        if self.has_state:
            found[Component.STATE] = _held([node], STATE)
        if self.has_hidden:
            found[Component.HIDDEN] = _held([node], HIDDEN)
        return found

    def count_use(self, node: Node) -> None:
        """A match that ends with `node` was taken: what served it is worth more from now on."""
        if self.has_state:
            node.state_uses += 1
        else:
            for above in node.back_to(node.end - self.window):
                above.window_uses += 1

    def divide(self, upper: Node, lower: Node) -> dict[int, int]:
        """Share `lower`'s payloads with the node just split off it; returns the change in bytes."""
        upper.window_uses = lower.window_uses
        upper.stamp = lower.stamp
        upper.copied = lower.copied & (1 << ATTENTION | 1 << WINDOW)
        upper.damaged = lower.damaged & (1 << ATTENTION | 1 << WINDOW)
        growth: dict[int, int] = {}
        for index in (ATTENTION, WINDOW):
            payload = lower.payloads[index]
            if payload is not None:
                nbytes = payload.nbytes
                head, tail = payload.split(upper.num_tokens)
                upper.payloads[index], lower.payloads[index] = head, tail
                growth[index] = head.nbytes + tail.nbytes - nbytes
        return growth

    def is_dead(self, leaf: Node) -> bool:
        """No match can end in this leaf: its bytes are useless until something is filled in."""
        return (self.has_state and leaf.payloads[STATE] is None) or (
            self.has_window and leaf.payloads[WINDOW] is None
        )

    def is_copied(self, node: Node) -> bool:
        """Whether all that the node carries is in the tier below, too."""
        payloads = node.payloads
        return all(payloads[i] is None or node.copied >> i & 1 for i in self.indices)

    def is_end(self, node: Node) -> bool:
        """Whether windows are kept so that a match can end with this node."""
        return node.payloads[STATE] is not None if self.has_state else not node.children

    def window_segment(self, node: Node) -> Iterator[Node]:
        """The nodes whose window KV a restore at `node` needs; of an end, all that count it."""
        if not self.has_window:
            return iter(())
        return node.back_to(node.window_floor if self.is_end(node) else node.end - self.window)

    def num_saved(self, node: Node) -> int:
        """Tokens computed again if no match could end at this node, only further up."""
        if not self.has_state:
            return node.num_tokens
        above = node.parent
        assert above is not None
        for _ in range(MAX_GAP_NODES):
            if above.parent is None or above.payloads[STATE] is not None:
                break
            above = above.parent
        return node.end - above.end


def _held(nodes: Iterator[Node] | list[Node], index: int) -> tuple[Payload, ...]:
    payloads = [node.payloads[index] for node in nodes]
    return tuple(payload for payload in reversed(payloads) if payload is not None)


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

    def divide(self, upper: Node, lower: Node) -> list[Node]:
        """Share the users of a node that was split; returns what no end looks back on now.

        Ends that do not reach back to `upper` are taken off it if they are near. Those further
        down stay users of both until they go: too many keep a window longer, never too short.
        """
        upper.window_users = lower.window_users
        free: list[Node] = []
        for end in self._ends_near(lower):
            if end.end - self._rules.window >= upper.end:
                free += self.uncount(end, upper)
                end.window_floor = lower.start
        return free

    def uncount(self, end: Node, first: Node) -> list[Node]:
        """Take `end` off the users of `first` and of those above it, where no match can end there
        any more; returns the nodes that no end looks back on now."""
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


class Locks:
    """What is locked, node by node, and how many bytes that is. A lock ends at a node. It keeps:

    attention   node.path_locks > 0    locks that end here, and locked children
    window      node.window_locks > 0  locks whose window segment includes the node
    state       node.locks > 0         locks that end here
    hidden      like the state of its node, or like attention where there are no states
    """

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
