"""Metal kernels of ours, each made once, and the numbers that they are given. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

Kernel = Callable[..., list[mx.array]]


def metal_kernel(
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    source: str,
    *,
    header: str = "",
    strided: bool = False,
) -> Kernel:
    """`strided`: it reads strides. Slices of a wide product, say, are not copied for it."""
    return _made(mx.fast.metal_kernel, name, inputs, outputs, source, header, strided)


@cache
def _made(
    make: Callable[..., Any],
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    source: str,
    header: str,
    strided: bool,
) -> Kernel:
    kernel: Kernel = make(
        name=name,
        input_names=[*inputs],
        output_names=[*outputs],
        source=source,
        header=header,
        ensure_row_contiguous=not strided,
    )
    return kernel


@cache
def constants(*values: float) -> mx.array:
    """float32. Evaluated: a compiled step would make them again."""
    numbers = mx.array(values, dtype=mx.float32)
    mx.eval(numbers)
    return numbers
