"""Products with experts' weights equal mlx's own, whichever way they are asked for."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from pippin.backends.mlx.gpu.experts.expert_products import gather_mm, gather_qmm

EXPERTS = mx.array([[[0, 3]], [[2, 2]], [[1, 0]]], dtype=mx.uint32)


@pytest.mark.parametrize(
    "options",
    [
        {"rhs_indices": EXPERTS},
        {"rhs_indices": mx.sort(EXPERTS, axis=None).reshape(3, 1, 2), "sorted_indices": True},
        {"rhs_indices": EXPERTS, "lhs_indices": mx.array([[[2]], [[1]], [[0]]], dtype=mx.uint32)},
    ],
    ids=["rows as they lie", "sorted", "given rows"],
)
def test_the_same_numbers_as_mlx(options: dict[str, Any]) -> None:
    mx.random.seed(0)
    x = mx.random.normal((3, 1, 1, 1, 64))
    weights = mx.random.normal((4, 64, 32))
    ours, theirs = (f(x, weights, **options) for f in (gather_mm, mx.gather_mm))
    assert mx.array_equal(ours, theirs).item()
    packed = mx.quantize(mx.random.normal((4, 32, 64)), group_size=32, bits=4)
    ours, theirs = (
        f(x, *packed, transpose=True, group_size=32, bits=4, **options)
        for f in (gather_qmm, mx.gather_qmm)
    )
    assert mx.array_equal(ours, theirs).item()


def test_row_numbers_by_position_are_mlx_s() -> None:
    x, weights = mx.random.normal((3, 1, 64)), mx.random.normal((4, 64, 32))
    rows, experts = mx.array([2, 0], dtype=mx.uint32), mx.array([1, 3], dtype=mx.uint32)
    ours, theirs = (f(x, weights, rows, experts) for f in (gather_mm, mx.gather_mm))
    assert mx.array_equal(ours, theirs).item()
