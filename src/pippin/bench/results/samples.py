"""Percentiles and spreads of measured numbers. Knows no clock and no server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie, interpolated between neighbours."""
    return float(np.quantile(values, share)) if values else math.nan


def median(values: Sequence[float]) -> float:
    return percentile(values, 0.5)


def ratio(value: float, base: float) -> float:
    """Not a number where there is nothing to compare with."""
    return value / base if base else math.nan


@dataclass(frozen=True)
class Spread:
    """What is worth saying about many measurements of one thing."""

    count: int
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(
            count=len(values),
            p50=percentile(values, 0.5),
            p99=percentile(values, 0.99),
            max=max(values, default=math.nan),
        )
