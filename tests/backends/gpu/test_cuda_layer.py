"""A Gated DeltaNet layer's token as one CUDA kernel, against mlx-lm's own layer."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs

from pippin.backends.mlx.gpu.cuda_layer import FusedGatedDeltaNet, fuse_layers
from pippin.backends.mlx.gpu.siblings import find_siblings, merge
from pippin.backends.mlx.recurrent.conv import use_shift_conv1d

HIDDEN, K_HEADS, V_HEADS, DIM, TAPS = 96, 2, 4, 32, 4


def layer_of(k_dim: int = DIM) -> GatedDeltaNet:
    mx.random.seed(0)
    args = TextModelArgs(
        hidden_size=HIDDEN,
        linear_num_key_heads=K_HEADS,
        linear_num_value_heads=V_HEADS,
        linear_key_head_dim=k_dim,
        linear_value_head_dim=DIM,
        linear_conv_kernel_dim=TAPS,
    )
    layer = GatedDeltaNet(args)
    layer.norm.weight = mx.random.normal((DIM,))
    layer.dt_bias = mx.random.normal((V_HEADS,))
    layer.eval()
    return layer


def fused(layer: GatedDeltaNet) -> GatedDeltaNet:
    merge(find_siblings(layer, lambda: layer(mx.zeros((1, 1, HIDDEN)))))
    use_shift_conv1d(layer.conv1d, cpu=False)
    fuse_layers(layer)
    return layer


def cache_of(batch: int) -> ArraysCache:
    mx.random.seed(1)
    cache = ArraysCache(size=2)
    cache[0] = mx.random.normal((batch, TAPS - 1, (2 * K_HEADS + V_HEADS) * DIM))
    cache[1] = mx.random.normal((batch, V_HEADS, DIM, DIM))
    return cache


@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_one_token_agrees_with_mlx_lm(batch: int) -> None:
    x = mx.random.normal((batch, 1, HIDDEN))
    results = []
    for layer in (fused(layer_of()), layer_of()):
        cache = cache_of(batch)
        results.append((layer(x, None, cache), cache[0], cache[1]))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=2e-5, rtol=2e-5)


def test_other_calls_go_to_mlx_lm() -> None:
    layer = fused(layer_of())
    assert type(layer) is FusedGatedDeltaNet
    for x, cache in (
        (mx.random.normal((2, 5, HIDDEN)), cache_of(2)),  # many tokens
        (mx.random.normal((2, 1, HIDDEN)), ArraysCache(size=2)),  # nothing before them
    ):
        want_cache = ArraysCache(size=2)
        want_cache[0], want_cache[1] = cache[0], cache[1]
        want = layer_of()(x, None, want_cache)
        np.testing.assert_allclose(np.array(layer(x, None, cache)), np.array(want), atol=1e-5)
        np.testing.assert_allclose(np.array(cache[1]), np.array(want_cache[1]), atol=1e-5)


def test_a_layer_of_another_shape_is_left_alone() -> None:
    assert type(fused(layer_of(k_dim=48))) is GatedDeltaNet
