"""Gated DeltaNet layers as CUDA kernels, one token and many, against mlx-lm's own layer."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.qwen3_5 import GatedDeltaNet

from delta_layers import HIDDEN, K_HEADS, TAPS, V_HEADS, layer_of
from pippin.backends.mlx.gpu.cuda_layer import FusedGatedDeltaNet, fuse_layers
from pippin.backends.mlx.gpu.siblings import merge
from pippin.backends.mlx.recurrent.conv import use_shift_conv1d
from pippin.backends.mlx.recurrent.taps import tap_block_states, tap_conv_inputs
from pippin.backends.mlx.siblings import find_siblings

DIM = 32


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


needs_cuda = pytest.mark.skipif(not mx.cuda.is_available(), reason="needs an NVIDIA GPU")


@needs_cuda
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_one_token_agrees_with_mlx_lm(batch: int) -> None:
    x = mx.random.normal((batch, 1, HIDDEN))
    results = []
    for layer in (fused(layer_of(DIM, DIM)), layer_of(DIM, DIM)):
        cache = cache_of(batch)
        results.append((layer(x, None, cache), cache[0], cache[1]))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=2e-5, rtol=2e-5)


@needs_cuda
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("lengths", [(2,), (64,), (150,), (70, 3, 64, 1)])
def test_many_tokens_agree_with_mlx_lm(lengths: tuple[int, ...], fresh: bool) -> None:
    """Rows of all lengths; what comes out past a row's end means nothing."""
    batch, num_tokens = len(lengths), max(lengths)
    x = mx.random.normal((batch, num_tokens, HIDDEN))
    results = []
    for layer in (fused(layer_of(DIM, DIM)), layer_of(DIM, DIM)):
        cache = ArraysCache(size=2) if fresh else cache_of(batch)
        if batch > 1:
            cache.lengths = mx.array(lengths)
        y = layer(x, cache.make_mask(num_tokens), cache)
        results.append([y[row, :n] for row, n in enumerate(lengths)] + [cache[0], cache[1]])
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=5e-5, rtol=5e-4)


@needs_cuda
def test_states_inside_a_chunk_are_those_of_shorter_chunks() -> None:
    layer, x = fused(layer_of(DIM, DIM)), mx.random.normal((2, 150, HIDDEN))
    with tap_block_states() as blocks, tap_conv_inputs() as inputs:
        layer(x, None, cache_of(2))
    for number, n in enumerate((64, 128, 150)):
        cache = cache_of(2)
        layer(x[:, :n], None, cache)
        np.testing.assert_allclose(np.array(blocks[0][number]), np.array(cache[1]), atol=1e-6)
        kept = inputs[0][:, n : n + TAPS - 1]
        np.testing.assert_allclose(np.array(kept), np.array(cache[0]), atol=1e-6)


def test_a_token_with_nothing_before_it_goes_to_mlx_lm() -> None:
    layer = fused(layer_of(DIM, DIM))
    assert type(layer) is FusedGatedDeltaNet
    x, cache, want_cache = mx.random.normal((2, 1, HIDDEN)), ArraysCache(2), ArraysCache(2)
    want = layer_of(DIM, DIM)(x, None, want_cache)
    np.testing.assert_allclose(np.array(layer(x, None, cache)), np.array(want), atol=1e-5)
    np.testing.assert_allclose(np.array(cache[1]), np.array(want_cache[1]), atol=1e-5)


def test_a_layer_of_another_shape_is_left_alone() -> None:
    assert type(fused(layer_of(48, DIM))) is GatedDeltaNet
