"""How prompts share what a step may compute. Knows lengths and waits, no requests and no clock.

A prompt's turn is weighed by what it still needs and how long it has waited (the highest response
ratio goes first), so a short one passes a long one, and a long one is not passed for ever. While a
short one waits, no long one takes all of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One prompt that has started."""

    num_left: int  # tokens it still needs
    num_waited: int  # tokens that steps have computed for anybody since it came


def share(turns: Sequence[Turn], budget: int, *, shortest_waiting: int | None = None) -> list[int]:
    """Tokens of this step for each of `turns`; what is left over is for those not started.

    `shortest_waiting`: what the shortest of these would need. Half of a step is kept for whoever
    can be done with it.
    """
    shares = [0] * len(turns)
    if not turns:
        return shares
    order = sorted(range(len(turns)), key=lambda i: _ratio(turns[i]), reverse=True)
    left = budget
    for place, index in enumerate(order):
        others = [turns[i].num_left for i in order[place + 1 :]]
        if shortest_waiting is not None:
            others.append(shortest_waiting)
        kept = _kept(others, budget // 2)
        shares[index] = max(0, min(turns[index].num_left, left - kept))
        left -= shares[index]
    return shares


def _kept(others: Sequence[int], most: int) -> int:
    """What those need that can be finished with at most `most` tokens together."""
    kept = 0
    for num_left in sorted(others):
        if kept + num_left > most:
            break
        kept += num_left
    return kept


def _ratio(turn: Turn) -> float:
    return (turn.num_waited + turn.num_left) / max(turn.num_left, 1)
