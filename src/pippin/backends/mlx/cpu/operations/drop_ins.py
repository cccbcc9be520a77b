"""Stand-ins for mlx's own functions that are one kernel on a GPU and many operations on a CPU.

Each answers what it is for, and hands everything else to mlx.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import mlx.core as mx
from mlx_lm.models.activations import swiglu as _mlx_lm_swiglu

from pippin.backends.mlx.cpu.operations.bindings import are_float32, operations

ROPE_OPTIONS = {"traditional", "base", "scale", "offset", "freqs"}

# As they were: substitutions.py binds these names anew.
_mlx_rms_norm, _mlx_rope = mx.fast.rms_norm, mx.fast.rope


def rms_norm(x: mx.array, weight: mx.array | None, eps: float, **options: Any) -> mx.array:
    """Drop-in for `mx.fast.rms_norm`."""
    ours = operations("rms_norm")
    given = (x,) if weight is None else (x, weight)
    if ours is None or options or not x.size or not are_float32(*given):
        return _mlx_rms_norm(x, weight, eps, **options)
    return ours.rms_norm(x, weight, eps)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Drop-in for `mlx_lm.models.activations.swiglu`: silu(gate) * x."""
    ours = operations("swiglu")
    if ours is None or not x.size or x.shape != gate.shape or not are_float32(gate, x):
        y: mx.array = _mlx_lm_swiglu(gate, x)
        return y
    return ours.swiglu(gate, x)


def attention(
    queries: mx.array,  # [B, Hq, S, D]
    keys: mx.array,  # [B, Hkv, L, D]
    values: mx.array,  # [B, Hkv, L, Dv]
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    **options: Any,
) -> mx.array:
    """Drop-in for `mx.fast.scaled_dot_product_attention`. Ours keeps no scores."""
    ours = operations("attention")
    known = sinks is None and _is_simple(mask, queries, keys)
    if ours is None or not known or not are_float32(queries, keys, values):
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks, **options
        )
    allowed = mask if isinstance(mask, mx.array) else None
    return ours.attention(queries, keys, values, scale, allowed, causal=isinstance(mask, str))


def _is_simple(mask: mx.array | str | None, queries: mx.array, keys: mx.array) -> bool:
    """The same for all heads, and nothing is added."""
    if not isinstance(mask, mx.array):
        return True
    each_row = (queries.shape[0], 1, queries.shape[2], keys.shape[2])
    return bool(mask.dtype == mx.bool_) and mask.shape in (each_row, (1, *each_row[1:]))


def rope(x: mx.array, dims: int, **options: Any) -> mx.array:
    """Drop-in for `mx.fast.rope`."""
    ours = operations("rope")
    known = options.keys() <= ROPE_OPTIONS and not options["traditional"]
    if ours is None or not known or x.ndim != 4 or not x.size or not are_float32(x):
        return _mlx_rope(x, dims, **options)
    offset, freqs = options["offset"], options.get("freqs")
    if not _is_known(offset, x.shape[0]):
        return _mlx_rope(x, dims, **options)
    if freqs is None:
        inverse = frequencies(dims, options["base"])
    else:
        inverse = 1.0 / freqs.astype(mx.float32)
    return ours.rope(x, inverse, offset, options["scale"])


def _is_known(offset: int | mx.array, num_rows: int) -> bool:
    if isinstance(offset, int):
        return True
    return offset.dtype == mx.int32 and offset.ndim <= 1 and offset.size in (1, num_rows)


@lru_cache(maxsize=16)
def frequencies(dims: int, base: float) -> mx.array:
    """As mlx computes them, to the last bit: they are multiplied by positions."""
    half = dims // 2
    step = mx.array(math.log(base) / half, mx.float32)
    inverse = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * step)
    mx.eval(inverse)
    return inverse
