"""How often drafts are right: learnt by request, by confidence and by place. Knows no costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

AT_FIRST = 0.7  # share of drafts that are right, before any was verified,
PRIOR_OF_ALL = 2.0  # and how many verified ones that counts as
PRIOR_OF_REQUEST = 3.0  # likewise, for a request, what is known of all of them
KEPT = 0.9  # of what was seen, at each draft: texts change


@dataclass
class _Places:
    """By place behind the input token: drafts whose forerunners were right."""

    tried: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def add(self, depth: int, accepted: int) -> None:
        for place in range(min(depth, accepted + 1)):
            if place == len(self.tried):
                self.tried.append(0.0)
                self.right.append(0.0)
            self.tried[place] = KEPT * self.tried[place] + 1.0
            self.right[place] = KEPT * self.right[place] + (place < accepted)

    def rates(self, before: Sequence[float], prior: float) -> list[float]:
        """`before`: what is believed without these, and counts as `prior` drafts."""
        known = zip(self.tried, self.right, before, strict=False)
        rates = [(right + prior * rate) / (tried + prior) for tried, right, rate in known]
        return rates + list(before[len(rates) :])


class Acceptance:
    def __init__(self) -> None:
        self._of_all: defaultdict[int, _Places] = defaultdict(_Places)
        self._of_request: dict[str, defaultdict[int, _Places]] = {}

    def observe(self, request_id: str, confidence: int, depth: int, accepted: int) -> None:
        self._of_all[confidence].add(depth, accepted)
        of_request = self._of_request.setdefault(request_id, defaultdict(_Places))
        of_request[confidence].add(depth, accepted)

    def survival(self, request_id: str, confidence: int, depth: int) -> list[float]:
        """For each of `depth` drafts, the chance that it and all before it are right."""
        rates = self._of_all[confidence].rates([AT_FIRST] * depth, PRIOR_OF_ALL)
        of_request = self._of_request.get(request_id)
        if of_request is not None and confidence in of_request:
            rates = of_request[confidence].rates(rates, PRIOR_OF_REQUEST)
        chances, chance = [], 1.0
        for rate in rates[:depth]:
            chance *= rate
            chances.append(chance)
        return chances

    def forget(self, request_id: str) -> None:
        self._of_request.pop(request_id, None)
