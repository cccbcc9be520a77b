"""What a tier lacks of a sequence that memory, or the tier above, has. Knows trees, no files."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from pippin.cache.policy import Placement
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tree.components import HIDDEN, INDEX, STATE, WINDOW, Rules
from pippin.cache.tree.radix import Node, TokenArray
from pippin.types import GRID, Component, Payload

STATE_STRIDE = 1024  # tokens between states on disk where no request is expected to continue

Sizes = Callable[[Component, int], int]  # bytes of a payload of so many tokens, as bytes


@dataclass(frozen=True)
class Run:
    """What one entry is to hold: KV of [start, end), or what is kept after `end`."""

    component: Component
    start: int  # of the latter, how far the path lies on disk by then
    end: int
    payloads: tuple[Payload, ...]  # borrowed from the tree above


def is_worth_writing(node: Node) -> bool:
    """States are large. Those on the grid are many, and few of them are used again."""
    likely = node.placement is not Placement.GRID or node.state_uses > 0
    return likely or node.end % STATE_STRIDE == 0


@dataclass
class Diff:
    """Finds the runs to write next, of one sequence, within `left` bytes; none if all is there."""

    rules: Rules
    above: PrefixCache
    disk: PrefixCache
    sizes: Sizes
    left: int
    wants_state: Callable[[Node], bool] = is_worth_writing
    runs: list[Run] = field(default_factory=list)

    def find(self, ids: TokenArray, salt: bytes = b"", root: bytes = b"") -> list[Run]:
        """`salt` and `root`: by what the tree above, and the disk's, know the salt."""
        path, reach = self.above.radix.walk(ids, salt)
        held = path[:-1] if path and path[-1].end > reach else path
        if not held:
            return []
        on_disk, disk_reach = self.disk.radix.walk(ids[: held[-1].end], root)
        top = disk_reach
        if self.rules.has_attention:
            top = self._add_attention(held[-1], disk_reach)
        kept = list(held[-1].ancestors())[::-1]  # once more: nodes may have been cut
        ends = self._add_ends(kept, on_disk, top)
        self._add_windows(ends, on_disk)
        self._add_hidden(ends, on_disk)
        return self.runs

    def _add_attention(self, last: Node, disk_reach: int) -> int:
        """All below what the disk has; returns how far the disk will have it."""
        if disk_reach >= last.end:
            return disk_reach
        most = self.left // self.sizes(Component.ATTENTION, 1)
        end = min(last.end, disk_reach + most)
        if end < last.end:
            end -= end % GRID
        if end <= disk_reach:
            return disk_reach
        for position in (end, disk_reach):
            if position:
                self.above.tree.end_node(last, position)
        nodes = [node for node in last.ancestors() if disk_reach < node.end <= end][::-1]
        self._add(Component.ATTENTION, disk_reach, nodes)
        return end

    def _add_ends(self, held: Sequence[Node], on_disk: Sequence[Node], top: int) -> list[Node]:
        """Where matches are to end on disk: at states, as far as there is room for them."""
        known = _by_end(on_disk)
        connected = held if not self.rules.has_attention else [n for n in held if n.end <= top]
        if not self.rules.has_state:  # ends of prompts, and the path's end
            return [n for n in connected if n.payloads[HIDDEN] is not None or n is connected[-1]]
        stops = [node for node in connected if node.payloads[STATE] is not None]
        ends: list[Node] = []
        reach = top
        for node, below in zip_longest(stops, stops[1:]):
            there = known.get(node.end)
            if there is not None and there.payloads[STATE] is not None:
                ends.append(node)
            elif self._is_wanted(node, below) and self._fits(Component.STATE, 1):
                self._add(Component.STATE, min(reach, node.end), [node])
                reach = max(reach, node.end)
                ends.append(node)
        return ends

    def _is_wanted(self, node: Node, below: Node | None) -> bool:
        """Without a hidden vector the same prompt again needs the state before its end."""
        if self.wants_state(node):
            return True
        return not self.rules.has_hidden and below is not None and self.wants_state(below)

    def _add_windows(self, ends: Sequence[Node], on_disk: Sequence[Node]) -> None:
        """The windows that a restore at these ends needs, each run of tokens once."""
        if not self.rules.has_window:
            return
        floors = [end.end - self.rules.window for end in ends]
        for end, floor in zip(ends, floors, strict=True):  # all of them first: a node is cut once
            if floor > 0:
                self.above.tree.end_node(end, floor)
        needed: dict[int, Node] = {}  # by start
        for end, floor in zip(ends, floors, strict=True):
            needed |= {node.start: node for node in end.back_to(floor)}
        starts = [node.start for node in on_disk]
        run: list[Node] = []
        for _, node in sorted(needed.items()):
            if node.payloads[WINDOW] is None or not _lacks_window(on_disk, starts, node):
                continue
            if run and run[-1].end != node.start:
                self._add(Component.WINDOW, run[0].start, run)
                run = []
            if self._fits(Component.WINDOW, node.num_tokens):
                run.append(node)
        if run:
            self._add(Component.WINDOW, run[0].start, run)

    def _add_hidden(self, ends: Sequence[Node], on_disk: Sequence[Node]) -> None:
        if not self.rules.has_hidden:
            return
        known = _by_end(on_disk)
        for node in ends:
            there = known.get(node.end)
            missing = there is None or there.payloads[HIDDEN] is None
            if node.payloads[HIDDEN] is not None and missing and self._fits(Component.HIDDEN, 1):
                self._add(Component.HIDDEN, node.end, [node])

    def _fits(self, component: Component, num_tokens: int) -> bool:
        """Whether there is room for so much; if so it is taken."""
        nbytes = self.sizes(component, num_tokens)
        if nbytes > self.left:
            return False
        self.left -= nbytes
        return True

    def _add(self, component: Component, start: int, nodes: Sequence[Node]) -> None:
        payloads = [node.payloads[INDEX[component]] for node in nodes]
        held = tuple(payload for payload in payloads if payload is not None)
        assert len(held) == len(nodes)
        if component is Component.ATTENTION:
            self.left -= self.sizes(component, nodes[-1].end - start)
        self.runs.append(Run(component, start, nodes[-1].end, held))


def _by_end(nodes: Sequence[Node]) -> dict[int, Node]:
    return {node.end: node for node in nodes}


def _lacks_window(on_disk: Sequence[Node], starts: Sequence[int], node: Node) -> bool:
    first = max(0, bisect_right(starts, node.start) - 1)
    across = on_disk[first : bisect_left(starts, node.end)]
    covered = sum(max(0, min(n.end, node.end) - max(n.start, node.start)) for n in across)
    return covered < node.num_tokens or any(n.payloads[WINDOW] is None for n in across)
