"""Attention with a gate behind it gives what mlx-lm's layer gives."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3_5 import TextModelArgs
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from pippin.backends.mlx.cpu.operations.calls import Operations, without_operations
from pippin.backends.mlx.cpu.operations.gated_attention import GatedAttention, use_gated_heads

HIDDEN = 48
TOLERANCE = 1e-5


def small_layer() -> Qwen3NextAttention:
    args: Any = TextModelArgs(
        hidden_size=HIDDEN, num_attention_heads=6, num_key_value_heads=2, head_dim=16
    )
    layer = Qwen3NextAttention(args)
    keys = iter(mx.random.split(mx.random.key(0), 64))
    layer.update(
        tree_map(lambda x: 0.3 * mx.random.normal(x.shape, key=next(keys)), layer.parameters())
    )
    return layer


@pytest.mark.parametrize("num_tokens", [1, 5, 70])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_layer_is_mlx_lm_s(ours: Operations, num_rows: int, num_tokens: int) -> None:
    layer = small_layer()
    x = mx.random.normal((num_rows, num_tokens, HIDDEN), key=mx.random.key(1))

    def run() -> list[mx.array]:
        cache = KVCache()
        mask = create_attention_mask(x, cache)
        return [layer(x, mask, cache), layer(x[:, :1], None, cache)]

    wanted = run()
    use_gated_heads(layer)
    assert isinstance(layer, GatedAttention)
    got = run()
    with without_operations():
        plain = run()
    for one, other, want in zip(got, plain, wanted, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(want), atol=TOLERANCE, rtol=TOLERANCE)
        assert np.array_equal(np.array(other), np.array(want))


def test_gates_are_read_where_they_lie(ours: Operations) -> None:
    """Half of what a product gave, and heads that were turned around."""
    x = mx.random.normal((2, 7, 3, 16), key=mx.random.key(2)).transpose(0, 2, 1, 3)
    gate = mx.split(mx.random.normal((2, 7, 3, 32), key=mx.random.key(3)), 2, axis=-1)[1]
    want = x.transpose(0, 2, 1, 3) * mx.sigmoid(gate)
    got = ours.gated_heads(x, gate)
    np.testing.assert_allclose(np.array(got), np.array(want).reshape(2, 7, 48), atol=1e-6)
