"""What an insert brings: payloads of one sequence, and which nodes get them.

Knows no requests, and not when to evict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pippin.cache.policy import Placement
from pippin.cache.tree.components import HIDDEN, INDEX, STATE, Rules
from pippin.cache.tree.payload_tree import Filled, PayloadTree
from pippin.cache.tree.radix import Node
from pippin.types import GRID, Component, Payload


@dataclass(frozen=True)
class Incoming:
    """The KV of tokens [start, end), states at positions along them, the hidden vector at `end`."""

    start: int
    end: int
    kv: Mapping[Component, Payload]
    states: Mapping[int, Payload]
    hidden: Payload | None
    placements: Mapping[int, Placement]  # why each state was taken

    @property
    def payloads(self) -> list[Payload]:
        hidden = () if self.hidden is None else (self.hidden,)
        return [*self.kv.values(), *self.states.values(), *hidden]

    def check(self, rules: Rules) -> None:
        start, end, keeps = self.start, self.end, rules.components
        for component, payload in self.kv.items():
            assert component in keeps, f"{component} for a model that keeps {keeps}"
            assert component.divides, f"{component} is no KV"
            assert payload.num_tokens == end - start, (
                f"{component} covers {payload.num_tokens} tokens, [{start}, {end}) is {end - start}"
            )
        assert not self.states or rules.has_state, f"states for a model that keeps {keeps}"
        assert all(0 < position <= end for position in self.states), f"states outside of (0, {end}]"

    def path_end(self, rules: Rules, held: int) -> int:
        """How far a path may grow of which the tree holds `held` tokens: a node of an attention
        model never lacks attention KV."""
        if rules.has_attention:
            return self.end if Component.ATTENTION in self.kv else held
        return self.end if self.kv else max([held, *self.states])

    def fill(self, tree: PayloadTree, tip: Node) -> Filled:
        """Give all of it to the nodes on the path to `tip` that lack it; releases the rest."""
        filled = self._add_states(tree, tip)
        for component, payload in self.kv.items():
            filled += _add_kv(tree, tip, INDEX[component], self.start, payload)
        for node in dict.fromkeys(node for node, _ in filled):
            tree.queue.update(node)
        tree.prune(tip)
        return filled + self._add_hidden(tree, tip)

    def _add_states(self, tree: PayloadTree, tip: Node) -> Filled:
        """Attach states to the ends of nodes along the path to `tip`."""
        filled: Filled = []
        node = tip
        for position in sorted(self.states, reverse=True):
            state = self.states[position]
            if position > tip.end:
                tree.refuse(state)
                continue
            node = tree.end_node(node, position)
            if node.payloads[STATE] is not None:
                tree.refuse(state)
                continue
            default = Placement.REPLY_END if position % GRID else Placement.GRID
            node.placement = self.placements.get(position, default)
            node.state_uses = 0
            tree.stats.placements[node.placement].placed += 1
            tree.attach(node, STATE, state)
            filled.append((node, STATE))
        return filled

    def _add_hidden(self, tree: PayloadTree, tip: Node) -> Filled:
        """Attach the hidden vector to `tip` if it ends there, and could be restored to sample."""
        if self.hidden is None:
            return []
        restorable = not tree.rules.has_state or tip.payloads[STATE] is not None
        if tip.end != self.end or not restorable or tip.payloads[HIDDEN] is not None:
            tree.refuse(self.hidden)
            return []
        tree.attach(tip, HIDDEN, self.hidden)
        tree.queue.update(tip)
        return [(tip, HIDDEN)]


def _add_kv(tree: PayloadTree, tip: Node, index: int, start: int, payload: Payload) -> Filled:
    """Give a payload that covers [start, ...) to the nodes up to `tip` that lack it.

    From the tip upwards, pieces are cut off the end of what is left:

        payload:  [ rest ............ | piece | already in the tree: refused ]
        nodes:    [ parent ]  ...     [ node ]
    """
    filled: Filled = []
    rest: Payload | None = payload
    for node in list(tip.back_to(start)):
        if node.payloads[index] is not None:
            continue
        if node.start < start:
            tree.split(node, start)  # `node` is now the part from `start` on
        assert rest is not None
        if node.end - start < rest.num_tokens:
            rest, cached_already = rest.split(node.end - start)
            tree.refuse(cached_already)
        head = None
        if node.start > start:
            head, rest = rest.split(node.start - start)
        tree.attach(node, index, rest)
        filled.append((node, index))
        rest = head
        if rest is None:
            break
    if rest is not None:
        tree.refuse(rest)
    return filled
