"""A small Gated DeltaNet layer of mlx-lm's, for tests of what stands in its place."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs

HIDDEN, K_HEADS, V_HEADS, TAPS = 96, 2, 4, 4


def layer_of(k_dim: int, v_dim: int) -> GatedDeltaNet:
    mx.random.seed(0)
    args = TextModelArgs(
        hidden_size=HIDDEN,
        linear_num_key_heads=K_HEADS,
        linear_num_value_heads=V_HEADS,
        linear_key_head_dim=k_dim,
        linear_value_head_dim=v_dim,
        linear_conv_kernel_dim=TAPS,
    )
    layer = GatedDeltaNet(args)
    layer.norm.weight = mx.random.normal((v_dim,))
    layer.dt_bias = mx.random.normal((V_HEADS,))
    layer.eval()
    return layer
