"""Two ways to do the same work, timed in turn and compared pair by pair. Knows no engine.

A machine's speed drifts over minutes; neighbours in time share it. So each pair gives a ratio, and
what is reported is the middle of the ratios, never the ratio of two averages.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pippin.bench.errors import BenchError
from pippin.bench.results.samples import median, percentile

T = TypeVar("T")
WARM_UPS = 2


@dataclass(frozen=True)
class Pairs:
    """One number of each way, pair by pair."""

    tried: list[float]
    base: list[float]

    @property
    def ratios(self) -> list[float]:
        return [tried / base for tried, base in zip(self.tried, self.base, strict=True)]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of the ratios lie between these."""
        return percentile(self.ratios, 0.25), percentile(self.ratios, 0.75)

    @property
    def extra_percent(self) -> dict[str, list[tuple[float, float]]]:
        """A named curve: how much more the tried way was than the base, pair by pair."""
        name = f"each pair; the median is {self.ratio - 1:+.1%}"
        return {name: [(float(i), (r - 1) * 100) for i, r in enumerate(self.ratios, start=1)]}

    def as_dict(self) -> dict[str, object]:
        return {
            "tried": self.tried,
            "base": self.base,
            "ratio": self.ratio,
            "quartiles": self.quartiles,
        }


def in_turn(
    num_pairs: int, tried: Callable[[str], T], base: Callable[[str], T]
) -> tuple[list[T], list[T]]:
    """Do both for each pair, swapping who goes first; both are told the pair's name.

    The first pairs only warm up. Collections of garbage would fall on one side or the other, so
    they wait.
    """
    if num_pairs < 1:
        raise BenchError(f"pairs must be at least 1, got {num_pairs}")
    results: tuple[list[T], list[T]] = ([], [])
    gc.collect()
    gc.disable()
    try:
        for index in range(-WARM_UPS, num_pairs):
            sides = [(tried, results[0]), (base, results[1])]
            for work, into in reversed(sides) if index % 2 else sides:
                result = work(f"pair {index}")
                if index >= 0:
                    into.append(result)
    finally:
        gc.enable()
    return results
