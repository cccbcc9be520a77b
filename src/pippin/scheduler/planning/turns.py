"""How prompts share what a step may compute. Knows lengths and waits, no requests and no clock.

A prompt's turn is weighed by what it still needs and how long it has waited (the highest response
ratio goes first), so a short one passes a long one, and a long one is not passed for ever. While a
short one waits, no long one takes all of a step; and the step that finishes it is short itself:

    |L L L L L L L L|L L L L L L L L|S L|L L L L L L L L|      S comes during the first, L goes on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One prompt that has started."""

    num_left: int  # tokens it still needs
    num_waited: int  # tokens that steps have computed for anybody since it came


def share(
    turns: Sequence[Turn],
    budget: int,
    *,
    shortest_waiting: int | None = None,
    for_unfinished: int | None = None,
) -> list[int]:
    """Tokens of this step for each of `turns`; what is left over is for those not started.

    `shortest_waiting`: what the shortest of these would need. Half of a step is kept for whoever
    can be done with it. `for_unfinished`: what all those may take that are not done with it.
    """
    shares = [0] * len(turns)
    if not turns:
        return shares
    order = sorted(range(len(turns)), key=lambda i: _ratio(turns[i]), reverse=True)
    left = budget
    unfinished = budget if for_unfinished is None else for_unfinished
    for place, index in enumerate(order):
        others = [turns[i].num_left for i in order[place + 1 :]]
        if shortest_waiting is not None:
            others.append(shortest_waiting)
        kept = _kept(others, budget // 2)
        most = max(0, left - kept)
        if turns[index].num_left > most:
            most = min(most, unfinished)
            unfinished -= most
        shares[index] = min(turns[index].num_left, most)
        left -= shares[index]
    return shares


def beside_short(
    turns: Sequence[Turn], budget: int, productive: int, *, shortest_waiting: int | None = None
) -> int:
    """What those may take of a step that it does not finish: who is finished waits for it, too.

    As much as those need that are done with half of the step, or a `productive` chunk if that is
    more; all where nobody is.
    """
    waiting = [] if shortest_waiting is None else [shortest_waiting]
    kept = _kept([*(turn.num_left for turn in turns), *waiting], budget // 2)
    return min(max(kept, productive), budget) if kept else budget


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
