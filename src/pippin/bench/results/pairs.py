"""Two ways to do the same work, timed in turn and compared pair by pair. Knows no engine.

A machine's speed drifts over minutes, and the two runs of a pair share it. So each pair gives a
ratio, and the median of the ratios is reported, never the ratio of two averages.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pippin.bench.errors import BenchError
from pippin.bench.results.report import Table, number, verdict
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

    def as_dict(self) -> dict[str, object]:
        return {
            "tried": self.tried,
            "base": self.base,
            "ratio": self.ratio,
            "quartiles": self.quartiles,
        }


@dataclass(frozen=True)
class Compared:
    """One row of a table: a number of each way, and which ratio is wanted."""

    name: str
    pairs: Pairs
    scale: float = 1.0  # from the unit of the pairs to the one in `name`
    at_least: float | None = None
    at_most: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        pairs = self.pairs
        medians = (number(median(values) * self.scale) for values in (pairs.tried, pairs.base))
        low, high = pairs.quartiles
        target = ""
        if self.at_least is not None:
            target = verdict(pairs.ratio, "{:.2f}x", at_least=self.at_least)
        elif self.at_most is not None:
            target = verdict(pairs.ratio, "{:.2f}x", at_most=self.at_most)
        return (self.name, *medians, f"{pairs.ratio:.3f}x", f"{low:.3f}-{high:.3f}", target)


def pairs_table(title: str, tried: str, base: str, rows: Sequence[Compared]) -> Table:
    """`tried` and `base` name the two ways."""
    header = ("", tried, base, "median of ratios", "quartiles", "target")
    return Table(title, header, [row.cells for row in rows])


def in_turn(
    num_pairs: int, tried: Callable[[str], T], base: Callable[[str], T]
) -> tuple[list[T], list[T]]:
    """Run both for each pair, in alternating order, each with the pair's name.

    The first pairs only warm up. Garbage is not collected meanwhile: one side would pay for it.
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
