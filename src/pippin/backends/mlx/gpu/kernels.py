"""Runs Metal kernels, each made once, and whether one computes here what plain operations do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import mlx.core as mx

from pippin.backends.fallbacks import note_fallback
from pippin.backends.mlx.layout import ROUNDING

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


def off_by(found: mx.array, expected: mx.array) -> mx.array:
    """How far the worst number is off, of the largest one that is expected."""
    plain = expected.astype(mx.float32)
    largest = mx.maximum(mx.abs(plain).max(), 1e-6)
    return mx.abs(found.astype(mx.float32) - plain).max() / largest


def agrees(without: str, errors: Callable[[], list[mx.array]]) -> bool:
    """Whether none of the `errors` is more than rounding. Else why not is noted, with `without`:
    what becomes of it."""
    try:
        worst = float(mx.stack(errors()).max())
    except Exception as failure:  # whatever a kernel can do on a machine that we have never seen
        note_fallback(without, failure, failure)
        return False
    if not worst <= ROUNDING:
        note_fallback(without, f"the kernel is off by {worst:.1g} here")
    return worst <= ROUNDING
