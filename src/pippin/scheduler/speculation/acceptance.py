"""How often drafts are right: learnt by request, by confidence and by place. Knows no costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

AT_FIRST = 0.7  # share of drafts that are right, before any was verified,
PRIOR_OF_ALL = 2.0  # and how many verified ones that counts as
PRIOR_OF_REQUEST = 8.0  # likewise, for a request, what is known of all of them
KEPT = 0.97  # of what was seen, at each draft: texts change


@dataclass
class _Places:
    """By place behind the input token: drafts whose forerunners were right."""

    tried: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def add(self, depth: int, accepted: int) -> None:
        tried, right = self.tried, self.right
        for place in range(min(depth, accepted + 1)):
            if place == len(tried):
                tried.append(0.0)
                right.append(0.0)
            tried[place] = KEPT * tried[place] + 1.0
            right[place] = KEPT * right[place] + (place < accepted)

    def survival(self, before: Sequence[float], prior: float) -> list[float]:
        """For each place, the chance that a draft there and all before it are right.

        `before`: rates that are believed without these, and count as `prior` drafts."""
        chances, chance, known = [], 1.0, len(self.tried)
        for place, rate in enumerate(before):
            if place < known:
                rate = (self.right[place] + prior * rate) / (self.tried[place] + prior)
            chance *= rate
            chances.append(chance)
        return chances

    def rates(self, before: float, prior: float) -> list[float]:
        known = zip(self.tried, self.right, strict=True)
        return [(right + prior * before) / (tried + prior) for tried, right in known]


@dataclass
class _OfAll:
    """What all requests showed for a confidence, and what follows: every row of a step asks."""

    places: _Places = field(default_factory=_Places)
    rates: list[float] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)

    def know(self, depth: int) -> None:
        """Bring what follows up to date, for so many drafts at least."""
        if len(self.rates) < depth:
            known = self.places.rates(AT_FIRST, PRIOR_OF_ALL)
            self.rates = known + [AT_FIRST] * (depth - len(known))
            self.survival = _NOTHING.survival(self.rates, 0.0)


_NOTHING = _Places()


class Acceptance:
    def __init__(self) -> None:
        self._of_all: defaultdict[int, _OfAll] = defaultdict(_OfAll)
        self._of_request: dict[str, dict[int, _Places]] = {}

    def observe(self, request_id: str, confidence: int, depth: int, accepted: int) -> None:
        of_all = self._of_all[confidence]
        of_all.places.add(depth, accepted)
        of_all.rates = []
        of_request = self._of_request.setdefault(request_id, {})
        if confidence not in of_request:
            of_request[confidence] = _Places()
        of_request[confidence].add(depth, accepted)

    def survival(self, request_id: str, confidence: int, depth: int) -> list[float]:
        """For each of `depth` drafts, the chance that it and all before it are right."""
        of_all = self._of_all[confidence]
        of_all.know(depth)
        own = self._of_request.get(request_id, {}).get(confidence)
        if own is None:
            return of_all.survival[:depth]
        return own.survival(of_all.rates[:depth], PRIOR_OF_REQUEST)

    def forget(self, request_id: str) -> None:
        self._of_request.pop(request_id, None)
