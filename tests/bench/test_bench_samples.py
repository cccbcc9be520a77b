"""Percentiles against numpy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pippin.bench.report import Spread, median, percentile, ratio

finite = st.floats(-1e6, 1e6)


@given(st.lists(finite, min_size=1, max_size=50), st.floats(0.0, 1.0))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    expected = float(np.percentile(values, share * 100))
    assert percentile(values, share) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_nothing_measured_is_not_a_number() -> None:
    assert math.isnan(median([]))
    assert math.isnan(Spread.of([]).max)
    assert math.isnan(ratio(1.0, 0.0))


def test_a_spread_keeps_the_worst() -> None:
    spread = Spread.of([1.0] * 99 + [50.0])
    assert (spread.count, spread.p50, spread.max) == (100, 1.0, 50.0)
    assert 1.0 < spread.p99 < 50.0
