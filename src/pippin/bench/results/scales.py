"""From numbers to pixels, and where an axis gets its marks. Knows no drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence

NUM_STEPS = 5  # about this many on a linear axis
FEW_DECADES = 2.5  # up to here a logarithmic axis has 1, 2, 5 in each; above, only powers of ten


class Scale:
    """Maps the span of some values onto pixels from `start` to `end`."""

    def __init__(
        self, span: Sequence[float], start: float, end: float, *, log: bool = False
    ) -> None:
        self._log = log
        self._low, self._high = self._at(min(span)), self._at(max(span))
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        width = self._high - self._low
        share = (self._at(value) - self._low) / width if width else 0.5
        return self._start + (self._end - self._start) * share

    def _at(self, value: float) -> float:
        return math.log10(value) if self._log else value


def ticks(values: Sequence[float], *, log: bool = False) -> list[float]:
    """Round numbers from just below the smallest value to just above the largest."""
    low, high = min(values), max(values)
    if log:
        return _log_ticks(low, high)
    step = _round_up((high - low) / NUM_STEPS or 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def _round_up(rough: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    within = (1, 2, 5) if math.log10(high / low) <= FEW_DECADES else (1,)
    marks = sorted(m * 10.0**d for d in decades for m in within)
    first = max(index for index, mark in enumerate(marks) if mark <= low * 1.001)
    last = min(index for index, mark in enumerate(marks) if mark >= high * 0.999)
    return marks[first : max(last, first + 1) + 1]
