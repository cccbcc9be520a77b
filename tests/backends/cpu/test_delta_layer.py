"""A Gated DeltaNet layer as one operation, against mlx-lm's own layer."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.qwen3_5 import GatedDeltaNet

from cases import cases
from delta_layers import HIDDEN, K_HEADS, TAPS, V_HEADS, layer_of
from pippin.backends.mlx.cpu.layers import OneOperationDeltaNet, use_one_operation
from pippin.backends.mlx.recurrent.replay import use_replay
from pippin.backends.mlx.recurrent.taps import tap_states, use_shift_conv1d

K_DIM, V_DIM = 24, 40
CONV_DIM = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM


pytestmark = pytest.mark.usefixtures("ours")


def made_over() -> GatedDeltaNet:
    layer = layer_of(K_DIM, V_DIM)
    use_shift_conv1d(layer.conv1d, cpu=True)
    use_replay(layer)
    use_one_operation(layer)
    assert type(layer) is OneOperationDeltaNet
    return layer


def cache_of(batch: int) -> ArraysCache:
    mx.random.seed(1)
    cache = ArraysCache(size=2)
    cache[0] = mx.random.normal((batch, TAPS - 1, CONV_DIM))
    cache[1] = mx.random.normal((batch, V_HEADS, V_DIM, K_DIM))
    return cache


@cases("fresh", [True, False])
@cases("lengths", [(1,), (2,), (64,), (150,), (1, 1, 1), (70, 3, 64, 1)])
def test_tokens_agree_with_mlx_lm(lengths: tuple[int, ...], fresh: bool) -> None:
    """Rows of all lengths; what comes out past a row's end means nothing, but is a number."""
    batch, num_tokens = len(lengths), max(lengths)
    x = mx.random.normal((batch, num_tokens, HIDDEN), key=mx.random.key(2))
    results = []
    for layer in (made_over(), layer_of(K_DIM, V_DIM)):
        cache = ArraysCache(size=2) if fresh else cache_of(batch)
        if len(set(lengths)) > 1:
            cache.lengths = mx.array(lengths)
        y = layer(x, cache.make_mask(num_tokens), cache)
        assert np.isfinite(np.array(y)).all()
        results.append([y[row, :n] for row, n in enumerate(lengths)] + [cache[0], cache[1]])
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=2e-5, rtol=2e-5)


def test_states_inside_a_chunk_are_those_of_shorter_chunks() -> None:
    layer, x = made_over(), mx.random.normal((2, 150, HIDDEN), key=mx.random.key(2))
    with tap_states() as taps:
        layer(x, None, cache_of(2))
    for number, n in enumerate((64, 128, 150)):
        cache = cache_of(2)
        layer(x[:, :n], None, cache)
        np.testing.assert_allclose(np.array(taps.states[0][number]), np.array(cache[1]), atol=1e-6)
        kept = taps.conv_inputs[0][:, n : n + TAPS - 1]
        np.testing.assert_allclose(np.array(kept), np.array(cache[0]), atol=1e-6)


def test_a_short_row_keeps_its_last_state_beside_a_long_one() -> None:
    layer, x = made_over(), mx.random.normal((3, 150, HIDDEN), key=mx.random.key(2))
    cache = cache_of(3)
    cache.lengths = mx.array([150, 3, 70])
    with tap_states() as taps:
        layer(x, cache.make_mask(150), cache)
    for row, ends in enumerate(((64, 128, 150), (3, 3, 3), (64, 70, 70))):
        for number, n in enumerate(ends):
            alone = cache_of(3)
            layer(x[:, :n], None, alone)
            got, want = np.array(taps.states[0][number][row]), np.array(alone[1][row])
            np.testing.assert_allclose(got, want, atol=1e-6)


def test_rows_that_are_padded_on_the_left_go_to_mlx_lm() -> None:
    x = mx.random.normal((2, 5, HIDDEN), key=mx.random.key(2))
    results = []
    for layer in (made_over(), layer_of(K_DIM, V_DIM)):
        cache = ArraysCache(size=2, left_padding=[0, 2])
        y = layer(x, cache.make_mask(5), cache)
        results.append((y[0], y[1, 2:], cache[0], cache[1]))
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=2e-5, rtol=2e-5)


def test_layers_of_other_numbers_are_left_alone() -> None:
    layer = layer_of(K_DIM, V_DIM)
    layer.set_dtype(mx.float16)
    use_shift_conv1d(layer.conv1d, cpu=True)
    use_replay(layer)
    use_one_operation(layer)
    assert not isinstance(layer, OneOperationDeltaNet)
