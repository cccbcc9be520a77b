"""Runs Metal kernels, each made once, and the numbers that they are given. Knows no kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import mlx.core as mx

Constants = Mapping[str, int | bool | mx.Dtype]


def run_kernel(
    name: str,
    source: str,
    inputs: Mapping[str, mx.array | None],  # None: it reads none, by its constants
    outputs: Mapping[str, tuple[Sequence[int], mx.Dtype]],  # shapes and types
    template: Constants,
    *,
    grid: tuple[int, int, int],
    threads: int,  # of a threadgroup, side by side
    header: str = "",
    strided: bool = False,
) -> list[mx.array]:
    """`strided`: it reads strides. Slices of a wide product, say, are not copied for it."""
    kernel = _made(
        mx.fast.metal_kernel, name, tuple(inputs), tuple(outputs), source, header, strided
    )
    found: list[mx.array] = kernel(
        inputs=[_nothing() if array is None else array for array in inputs.values()],
        template=[*template.items()],
        grid=grid,
        threadgroup=(threads, 1, 1),
        output_shapes=[shape for shape, _ in outputs.values()],
        output_dtypes=[dtype for _, dtype in outputs.values()],
    )
    return found


@cache
def _made(
    make: Callable[..., Any],
    name: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    source: str,
    header: str,
    strided: bool,
) -> Any:
    return make(
        name=name,
        input_names=[*inputs],
        output_names=[*outputs],
        source=source,
        header=header,
        ensure_row_contiguous=not strided,
    )


def _nothing() -> mx.array:
    """Eight numbers at the least: Metal has fewer in another address space."""
    return constants(*[0.0] * 8)


@cache
def constants(*values: float) -> mx.array:
    """float32. Evaluated: a compiled step would make them again."""
    numbers = mx.array(values, dtype=mx.float32)
    mx.eval(numbers)
    return numbers
