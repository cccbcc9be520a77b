"""exp and what is built on it, for CPUs, in multiplies and adds; knows no model.

mlx calls the C library's exp once per element (10-25 ns); these are polynomials over whole
arrays that a vector unit takes eight or sixteen at a time, as exact as float32 allows. On a GPU
mlx's own are better.
"""

from __future__ import annotations

import mlx.core as mx

from pippin.backends.mlx.cpu.operations.calls import are_float32, operations
from pippin.native_kernels import are_native

_LOG2_E = 1.4426950408889634
# 2^f for |f| <= 1/2 to 2e-9 of the value: a least-squares fit, weighted until its error was even.
_POWER_OF_TWO = (
    1.0,
    0.6931471824645996,
    0.24022646248340607,
    0.05550328642129898,
    0.009618489071726799,
    0.0013399930903688073,
    0.00015345810970757157,
)
# Added to a float32 and taken off again, 1.5 * 2^23 leaves the nearest integer.
_ROUNDER = 12582912.0
_EXPONENT_BIAS = 127
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


@mx.compile
def silu(x: mx.array) -> mx.array:
    """Drop-in for `mlx.nn.silu`."""
    wide = x.astype(mx.float32)
    return (wide * _sigmoid(wide)).astype(x.dtype)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Drop-in for `mlx_lm.models.activations.swiglu`: silu(gate) * x."""
    ours = operations("swiglu")
    if ours is not None and x.size and x.shape == gate.shape and are_float32(gate, x):
        return ours.swiglu(gate, x)
    return _swiglu(gate, x)


@mx.compile
def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    wide = gate.astype(mx.float32)
    return (wide * _sigmoid(wide) * x).astype(x.dtype)


@mx.compile
def precise_swiglu(like: mx.array, gate: mx.array, x: mx.array) -> mx.array:
    """Drop-in for `mlx_lm.models.activations.precise_swiglu`, which returns `like`'s type."""
    wide = gate.astype(mx.float32)
    return (wide * _sigmoid(wide) * x.astype(mx.float32)).astype(like.dtype)


def exp_below(scores: mx.array, top: mx.array) -> mx.array:
    """exp(score - top) of float32 scores that are no larger than `top`.

    To 2e-7 of a weight near 1 and 8e-6 of the faintest, as the argument is itself a float32. Below
    2^-126 it is zero, so that what is masked weighs nothing.
    """
    # The subtraction stays outside: a compiled loop with a broadcast takes no vector unit.
    return _exp_nonpositive(scores - top)


@mx.compile
def _exp_nonpositive(x: mx.array) -> mx.array:
    """exp of a float32 that is not above zero."""
    power = mx.maximum(x * _LOG2_E, -_EXPONENT_BIAS)
    whole = (power + _ROUNDER) - _ROUNDER
    f = power - whole
    # 2^whole is these bits; those of 2^-127 are a zero's.
    scale = ((whole.astype(mx.int32) + _EXPONENT_BIAS) << 23).view(mx.float32)
    f2 = f * f
    c = _POWER_OF_TWO
    high = (c[4] + c[5] * f) + c[6] * f2
    return ((c[0] + c[1] * f) + ((c[2] + c[3] * f) + high * f2) * f2) * scale


def unnormalised_softmax(scores: mx.array, axis: int = -1) -> mx.array:
    """exp(score - the largest along `axis`), float32; one of them must be above -inf."""
    wide = scores.astype(mx.float32)
    return exp_below(wide, wide.max(axis=axis, keepdims=True))
