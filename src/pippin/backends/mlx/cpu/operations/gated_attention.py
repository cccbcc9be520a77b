"""Attention whose output is gated (Qwen3-Next, Qwen3.5), with one operation behind it, on CPUs.

    q_proj -> [ queries | gate ];   attention -> [ heads side by side, by the sigmoid ] -> o_proj

mlx copies the gate and what attention gives, to turn heads and tokens around, before it multiplies.
The rest is mlx-lm's layer; any other call goes to mlx-lm's own.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import qwen3_next
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from pippin.backends.mlx.cpu.operations.calls import are_float32, operations


class GatedAttention(Qwen3NextAttention):
    """mlx-lm's layer, made over in place by `use_gated_heads`."""

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        ours = operations("gated_heads")
        y: mx.array
        if ours is None or cache is None or not x.size or not are_float32(x):
            y = super().__call__(x, mask, cache)
            return y
        batch, num_tokens, _ = x.shape
        by_head = (batch, num_tokens, self.num_attention_heads, -1)
        queries, gate = mx.split(self.q_proj(x).reshape(*by_head), 2, axis=-1)
        by_key_head = (batch, num_tokens, self.num_key_value_heads, -1)
        keys, values = self.k_proj(x).reshape(*by_key_head), self.v_proj(x).reshape(*by_key_head)
        queries = self.q_norm(queries).transpose(0, 2, 1, 3)
        keys = self.k_norm(keys).transpose(0, 2, 1, 3)
        values = values.transpose(0, 2, 1, 3)
        queries = self.rope(queries, offset=cache.offset)
        keys = self.rope(keys, offset=cache.offset)
        keys, values = cache.update_and_fetch(keys, values)
        attend = vars(qwen3_next)["scaled_dot_product_attention"]  # as substitutions.py bound it
        output = attend(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
        y = self.o_proj(ours.gated_heads(output, gate))
        return y


def use_gated_heads(model: Module) -> None:
    for _, part in model.named_modules():
        if type(part) is Qwen3NextAttention:
            part.__class__ = GatedAttention
