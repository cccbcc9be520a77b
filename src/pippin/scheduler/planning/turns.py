"""How prompts share what a step may compute. Knows lengths and waits, no requests and no clock.

A prompt's turn is weighed by what it still needs and how long it has waited (the highest response
ratio is first), so a short one passes a long one, and a long one is not passed for ever. While a
short one waits, no long one takes all of a step; and the step that finishes it is short itself:

    |L L L L L L L L|L L L L L L L L|S L|L L L L L L L L|      S arrives during the first, L goes on
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One prompt that has started."""

    num_left: int  # tokens it still needs
    num_waited: int  # tokens that steps have computed for any prompt since it arrived
    priority: int = 0  # the highest takes what it can use, then the next


def share(
    turns: Sequence[Turn],
    budget: int,
    *,
    shortest_waiting: int | None = None,
    for_unfinished: int | None = None,
) -> list[int]:
    """Tokens of this step for each of `turns`; what is left over is for those not started.

    `shortest_waiting`: what the shortest of these would need. Half of a step is kept for prompts of
    the same priority that can be finished with it. `for_unfinished`: what all those may take that
    are not finished with this step.
    """
    shares = [0] * len(turns)
    left = budget
    unfinished = budget if for_unfinished is None else for_unfinished
    order = sorted(range(len(turns)), key=lambda i: (turns[i].priority, _ratio(turns[i])))
    for _, alike in itertools.groupby(reversed(order), key=lambda i: turns[i].priority):
        level = list(alike)
        others = _Others([turns[i].num_left for i in level], budget // 2, shortest_waiting)
        for place, index in enumerate(level):
            others.remove(place)
            most = max(0, left - others.kept)
            if turns[index].num_left > most:
                most = min(most, unfinished)
                unfinished -= most
            shares[index] = min(turns[index].num_left, most)
            left -= shares[index]
    return shares


class _Others:
    """What those need that can be finished with at most `most` tokens together, the shortest first,
    while one after the other is removed. So they are passed once."""

    def __init__(self, lengths: Sequence[int], most: int, waiting: int | None) -> None:
        self._lengths = [*lengths, *([] if waiting is None else [waiting])]
        self._most = most
        self._order = sorted(range(len(self._lengths)), key=self._lengths.__getitem__)
        self._next = 0  # in `_order`: those before it are kept, or removed
        self._state = ["" for _ in self._lengths]  # "kept", "removed" or neither
        self.kept = 0
        self._extend()

    def remove(self, place: int) -> None:
        if self._state[place] == "kept":
            self.kept -= self._lengths[place]
        self._state[place] = "removed"
        self._extend()

    def _extend(self) -> None:
        while self._next < len(self._order):
            place = self._order[self._next]
            if self._state[place] != "removed":
                if self.kept + self._lengths[place] > self._most:
                    return
                self.kept += self._lengths[place]
                self._state[place] = "kept"
            self._next += 1


def beside_short(
    turns: Sequence[Turn], budget: int, productive: int, *, shortest_waiting: int | None = None
) -> int:
    """What those may take of a step that it does not finish: finished ones wait for it, too.

    As much as those need that are done with half of the step, or a `productive` chunk if that is
    more; all where none is.
    """
    kept = _Others([turn.num_left for turn in turns], budget // 2, shortest_waiting).kept
    return min(max(kept, productive), budget) if kept else budget


def _ratio(turn: Turn) -> float:
    return (turn.num_waited + turn.num_left) / max(turn.num_left, 1)
