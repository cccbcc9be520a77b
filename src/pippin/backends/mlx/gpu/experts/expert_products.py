"""Products with experts' weights, without an array of row numbers made for each. Knows no model.

mlx numbers the rows of such a product itself where it is not given the numbers: a launch for each
of a layer's three products, in every step.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any

import mlx.core as mx

MOST_SHAPES = 64  # that are remembered
_gather_mm, _gather_qmm = mx.gather_mm, mx.gather_qmm


def gather_mm(a: mx.array, b: mx.array, /, *args: Any, **options: Any) -> mx.array:
    """Drop-in for `mx.gather_mm`."""
    return _gather_mm(a, b, *args, **_numbered(a, args, options))


def gather_qmm(x: mx.array, w: mx.array, /, *args: Any, **options: Any) -> mx.array:
    """Drop-in for `mx.gather_qmm`."""
    # scales and biases come first
    return _gather_qmm(x, w, *args, **_numbered(x, args[2:], options))


def _numbered(x: mx.array, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """mlx has a faster product for rows sorted by expert, if it numbers them itself."""
    if args or options.get("lhs_indices") is not None or options.get("sorted_indices"):
        return options
    return {**options, "lhs_indices": _row_numbers(tuple(x.shape[:-2]))}


@lru_cache(MOST_SHAPES)
def _row_numbers(shape: tuple[int, ...]) -> mx.array:
    numbers = mx.arange(prod(shape), dtype=mx.uint32).reshape(shape)
    mx.eval(numbers)
    return numbers
