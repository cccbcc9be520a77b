"""exp and what is built on it, for CPUs, in multiplies and adds; knows no model.

mlx calls the C library's exp once per element (10-25 ns); these are polynomials over whole
arrays that a vector unit takes eight or sixteen at a time, as exact as float32 allows. On a GPU
mlx's own are better.
"""

from __future__ import annotations

import mlx.core as mx

_LOG2_E = 1.4426950408889634
# ln 2 in two parts: the first has so few bits that n * _LN2_HIGH is exact.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# exp(f) = 1 + f + f^2 (...) for |f| <= ln 2 / 2, from the Cephes library.
_POLYNOMIAL = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
# Added to a float32, 1.5 * 2^23 leaves its nearest integer in the low bits.
_ROUNDER = 12582912.0
_LIMIT = 87.0
_FAINT = 1e-30


def _exp(x: mx.array) -> mx.array:
    """exp of a float32 clipped to -87..87, to 1e-7 of the value."""
    x = mx.clip(x, -_LIMIT, _LIMIT)
    shifted = x * _LOG2_E + _ROUNDER
    n = shifted - _ROUNDER
    f = (x - n * _LN2_HIGH) - n * _LN2_LOW
    y = _POLYNOMIAL[0] * f + _POLYNOMIAL[1]
    for coefficient in _POLYNOMIAL[2:]:
        y = y * f + coefficient
    y = y * (f * f) + f + 1.0
    # Times 2^n: n, in the low bits of `shifted`, is added to the exponent.
    return (y.view(mx.int32) + (shifted.view(mx.int32) << 23)).view(mx.float32)


@mx.compile
def sigmoid(x: mx.array) -> mx.array:
    """Drop-in for `mx.sigmoid`."""
    return (1.0 / (1.0 + _exp(-x.astype(mx.float32)))).astype(x.dtype)


@mx.compile
def silu(x: mx.array) -> mx.array:
    """Drop-in for `mlx.nn.silu`."""
    wide = x.astype(mx.float32)
    return (wide / (1.0 + _exp(-wide))).astype(x.dtype)


@mx.compile
def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Drop-in for `mlx_lm.models.activations.swiglu`: silu(gate) * x."""
    wide = gate.astype(mx.float32)
    return (wide / (1.0 + _exp(-wide)) * x).astype(x.dtype)


@mx.compile
def precise_swiglu(like: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """Drop-in for `mlx_lm.models.activations.precise_swiglu`, which returns `like`'s type."""
    wide = gate.astype(mx.float32)
    return (wide / (1.0 + _exp(-wide)) * x.astype(mx.float32)).astype(like.dtype)


@mx.compile
def _weights(scores: mx.array, top: mx.array) -> mx.array:
    # What is masked must become zero, not 1e-38: smaller numbers still would slow the products.
    return mx.maximum(_exp(scores - top) - _FAINT, 0.0)


def unnormalised_softmax(scores: mx.array) -> mx.array:
    """exp(score - the row's largest), float32; each row needs one score above -inf."""
    wide = scores.astype(mx.float32)
    return _weights(wide, wide.max(axis=-1, keepdims=True))
