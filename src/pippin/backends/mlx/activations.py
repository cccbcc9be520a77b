"""exp and what is built on it, for CPUs, in multiplies and adds; knows no model.

mlx calls the C library's exp once per element (10-25 ns); these are polynomials over whole
arrays that a vector unit takes eight or sixteen at a time, as exact as float32 allows. On a GPU
mlx's own are better.
"""

from __future__ import annotations

import mlx.core as mx

from pippin.native_kernels import are_native

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
# tanh(h) = h P(h^2) / Q(h^2) for |h| < 7.9, lowest power first, as in Eigen; here in x = 2 h, and
# P halved.
_TANH_ODD: tuple[float, ...] = tuple(
    coefficient / 4 ** (power + 1)
    for power, coefficient in enumerate(
        (
            4.89352455891786e-03,
            6.37261928875436e-04,
            1.48572235717979e-05,
            5.12229709037114e-08,
            -8.60467152213735e-11,
            2.00018790482477e-13,
            -2.76076847742355e-16,
        )
    )
)
_TANH_EVEN: tuple[float, ...] = tuple(
    coefficient / 4**power
    for power, coefficient in enumerate(
        (4.89352518554385e-03, 2.26843463243900e-03, 1.18534705686654e-04, 1.19825839466702e-06)
    )
)
_SATURATED = 15.81


def _exp(x: mx.array) -> mx.array:
    """exp of a float32 clipped to -87..87, to 1e-7 of the value."""
    x = mx.clip(x, -_LIMIT, _LIMIT)
    shifted = x * _LOG2_E + _ROUNDER
    n = shifted - _ROUNDER
    f = (x - n * _LN2_HIGH) - n * _LN2_LOW
    y = _horner(_POLYNOMIAL, f)
    y = y * (f * f) + f + 1.0
    # Times 2^n: n, in the low bits of `shifted`, is added to the exponent.
    return (y.view(mx.int32) + (shifted.view(mx.int32) << 23)).view(mx.float32)


def _sigmoid(x: mx.array) -> mx.array:
    """Of a float32, to 1e-7: (1 + tanh(x / 2)) / 2, tanh as a quotient of polynomials.

    `mx.compile` fuses chains of about ten operations, so the polynomials are evaluated in pairs
    of terms, not one after the other: shallow enough for one or two passes over memory.
    """
    if are_native():
        x = mx.clip(x, -_SATURATED, _SATURATED)
    else:  # mx.clip minds NaN, which keeps a compiler for any x86-64 from using the vector unit
        x = 0.5 * (mx.abs(x + _SATURATED) - mx.abs(x - _SATURATED))
    x2 = x * x
    x4 = x2 * x2
    p, q = _TANH_ODD, _TANH_EVEN
    low = (p[0] + p[1] * x2) + (p[2] + p[3] * x2) * x4
    high = (p[4] + p[5] * x2) + p[6] * x4
    odd = low + high * (x4 * x4)
    even = (q[0] + q[1] * x2) + (q[2] + q[3] * x2) * x4
    return 0.5 + x * odd / even


def _horner(coefficients: tuple[float, ...], x: mx.array) -> mx.array:
    y = coefficients[0] * x + coefficients[1]
    for coefficient in coefficients[2:]:
        y = y * x + coefficient
    return y


@mx.compile
def silu(x: mx.array) -> mx.array:
    """Drop-in for `mlx.nn.silu`."""
    wide = x.astype(mx.float32)
    return (wide * _sigmoid(wide)).astype(x.dtype)


@mx.compile
def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Drop-in for `mlx_lm.models.activations.swiglu`: silu(gate) * x."""
    wide = gate.astype(mx.float32)
    return (wide * _sigmoid(wide) * x).astype(x.dtype)


@mx.compile
def precise_swiglu(like: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """Drop-in for `mlx_lm.models.activations.precise_swiglu`, which returns `like`'s type."""
    wide = gate.astype(mx.float32)
    return (wide * _sigmoid(wide) * x.astype(mx.float32)).astype(like.dtype)


@mx.compile
def exp_below(scores: mx.array, top: mx.array) -> mx.array:
    """exp(score - top) of float32 scores that are no larger than `top`."""
    # What is masked must become zero, not 1e-38: smaller numbers still would slow the products.
    return mx.maximum(_exp(scores - top) - _FAINT, 0.0)


def unnormalised_softmax(scores: mx.array) -> mx.array:
    """exp(score - the row's largest), float32; each row needs one score above -inf."""
    wide = scores.astype(mx.float32)
    return exp_below(wide, wide.max(axis=-1, keepdims=True))
