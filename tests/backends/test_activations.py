"""Vector exp and its kin against numpy in float64 and mlx's own."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import activations as mlx_lm_activations

from pippin.backends.mlx.activations import sigmoid, silu, swiglu, unnormalised_softmax

GRID = np.concatenate([np.linspace(-100, 100, 20_001), np.linspace(-1, 1, 2_001)]).astype("f4")


def float64_sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x.astype(np.float64), -87, 87)))


def test_sigmoid_and_silu_are_right_to_the_last_bits_of_float32() -> None:
    x = mx.array(GRID)
    want = float64_sigmoid(GRID)
    np.testing.assert_allclose(np.array(sigmoid(x)), want, rtol=5e-7)
    np.testing.assert_allclose(np.array(silu(x)), GRID * want, rtol=5e-7)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (silu, nn.silu),
        (sigmoid, mx.sigmoid),
        (lambda x: swiglu(x, x + 1), lambda x: mlx_lm_activations.swiglu(x, x + 1)),
    ],
)
def test_the_drop_ins_agree_with_mlx(
    ours: Callable[[mx.array], mx.array], theirs: Callable[[mx.array], mx.array], dtype: mx.Dtype
) -> None:
    x = (mx.random.normal((3, 5, 70), key=mx.random.key(0)) * 4).astype(dtype)
    got, want = ours(x), theirs(x)
    assert got.dtype == want.dtype
    tolerance = {mx.float32: 1e-6, mx.bfloat16: 2e-2}[dtype]
    np.testing.assert_allclose(
        np.array(got.astype(mx.float32)),
        np.array(want.astype(mx.float32)),
        rtol=tolerance,
        atol=tolerance,
    )


def test_infinite_inputs_saturate() -> None:
    x = mx.array([-np.inf, np.inf], dtype=mx.float32)
    np.testing.assert_allclose(np.array(sigmoid(x)), [0, 1], atol=1e-37)


@pytest.mark.parametrize("masked", [-np.inf, float(np.finfo(np.float32).min), -1e9])
def test_masked_scores_weigh_exactly_nothing(masked: float) -> None:
    scores = mx.array([[0.5, masked, -0.5, masked]], dtype=mx.float32)
    weights = np.array(unnormalised_softmax(scores))
    assert (weights[0, [1, 3]] == 0).all()
    assert weights[0, 0] == 1


def test_weights_divided_by_their_sum_are_the_softmax() -> None:
    flat, peaked = mx.zeros((1, 5000)), mx.arange(5000)[None].astype(mx.float32) * 3
    for scores in (flat, peaked, flat + 1e4, flat - 1e4, (peaked / 50).astype(mx.bfloat16)):
        weights = np.array(unnormalised_softmax(scores))
        want = np.array(mx.softmax(scores.astype(mx.float32), axis=-1))
        np.testing.assert_allclose(weights / weights.sum(), want, rtol=1e-6, atol=1e-12)
