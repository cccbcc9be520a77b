"""Vector exp and its kin against numpy in float64 and mlx's own."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import activations as mlx_lm_activations

from pippin.backends.mlx.cpu.activations import (
    exp_below,
    precise_swiglu,
    silu,
    swiglu,
    unnormalised_softmax,
)

GRID = np.concatenate([np.linspace(-100, 100, 20_001), np.linspace(-1, 1, 2_001)]).astype("f4")


def float64_sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x.astype(np.float64), -87, 87)))


def test_silu_is_right_to_the_last_bits_of_float32() -> None:
    want = GRID * float64_sigmoid(GRID)
    got = np.array(silu(mx.array(GRID)))
    near = np.abs(GRID) < 15
    np.testing.assert_allclose(got[near], want[near], rtol=1e-6, atol=5e-6)
    # Further out sigmoid stops at 1.4e-7 and one less that: x times it is still next to nothing.
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=5e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (silu, nn.silu),
        (
            lambda x: precise_swiglu(x, x, x + 1),
            lambda x: mlx_lm_activations.precise_swiglu(x, x, x + 1),
        ),
        (lambda x: swiglu(x, x + 1), lambda x: mlx_lm_activations.swiglu(x, x + 1)),
    ],
)
def test_the_drop_ins_agree_with_mlx(
    ours: Callable[[mx.array], mx.array], theirs: Callable[[mx.array], mx.array], dtype: mx.Dtype
) -> None:
    x = (mx.random.normal((3, 5, 70), key=mx.random.key(0)) * 4).astype(dtype)
    got, want = ours(x), theirs(x)
    assert got.dtype == want.dtype
    tolerance = {mx.float32: 1e-6, mx.bfloat16: 2e-2}[dtype]  # of the largest: an error of
    # 1e-7 in the sigmoid of a gate of -16 is multiplied by what it gates
    np.testing.assert_allclose(
        np.array(got.astype(mx.float32)),
        np.array(want.astype(mx.float32)),
        rtol=tolerance,
        atol=tolerance * mx.abs(want).max().item(),
    )


def test_a_large_input_passes_through_or_is_silenced() -> None:
    x = mx.array([-1e4, -40.0, 40.0, 1e4], dtype=mx.float32)
    np.testing.assert_allclose(np.array(silu(x)), [0, 0, 40, 1e4], rtol=1e-6, atol=5e-3)


@pytest.mark.parametrize("masked", [-np.inf, float(np.finfo(np.float32).min), -1e9])
def test_masked_scores_weigh_exactly_nothing(masked: float) -> None:
    scores = mx.array([[0.5, masked, -0.5, masked]], dtype=mx.float32)
    weights = np.array(unnormalised_softmax(scores))
    assert (weights[0, [1, 3]] == 0).all()
    assert weights[0, 0] == 1


def test_weights_are_right_from_the_largest_to_the_faintest() -> None:
    below = np.linspace(-87, 0, 10_001).astype(np.float32)
    want = np.exp(below.astype(np.float64))
    got = np.array(exp_below(mx.array(below), mx.array(0.0)))
    np.testing.assert_allclose(got, want, rtol=3e-5)  # below / ln 2 is itself a float32
    near = below > -1
    np.testing.assert_allclose(got[near], want[near], rtol=5e-7)


def test_weights_divided_by_their_sum_are_the_softmax() -> None:
    flat, peaked = mx.zeros((1, 5000)), mx.arange(5000)[None].astype(mx.float32) * 3
    for scores in (flat, peaked, flat + 1e4, flat - 1e4, (peaked / 50).astype(mx.bfloat16)):
        weights = np.array(unnormalised_softmax(scores))
        want = np.array(mx.softmax(scores.astype(mx.float32), axis=-1))
        np.testing.assert_allclose(weights / weights.sum(), want, rtol=5e-6, atol=1e-12)
