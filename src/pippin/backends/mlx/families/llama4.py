"""Llama 4 with rows of different lengths. Knows no rows: caches make masks and have offsets.

mlx-lm's code makes its mask, and the scale of its queries, of ranges of positions that are Python
integers, the same for all rows. These classes take the place of mlx-lm's own in a served model;
with mlx-lm's own caches they do what they did.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import llama4
from mlx_lm.models.base import create_attention_mask

FULL_EVERY = 4  # every fourth layer sees all chunks; mlx-lm has the number in its code, too


class RowsLlamaModel(llama4.LlamaModel):
    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        if cache is None or not hasattr(cache[0], "make_mask"):
            return super().__call__(inputs, cache)  # type: ignore[no-any-return]
        h = self.embed_tokens(inputs)
        first, full = cache[0], cache[FULL_EVERY - 1]
        masks = [create_attention_mask(h, first)] * (FULL_EVERY - 1)
        masks.append(create_attention_mask(h, full))
        for index, (layer, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
            h = layer(h, masks[index % FULL_EVERY], cache=layer_cache)
        normed: mx.array = self.norm(h)
        return normed


class RowsAttention(llama4.Attention):
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        offset = None if cache is None else cache.offset
        scales = self.attn_temperature_tuning and not self.use_rope
        if not scales or not isinstance(offset, mx.array):
            return super().__call__(x, mask, cache)
        num_rows, length, _ = x.shape
        queries, keys, values = (
            product(x).reshape(num_rows, length, heads, -1).transpose(0, 2, 1, 3)
            for product, heads in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        place = offset[:, None, None, None] + mx.arange(1, length + 1)[:, None]
        scale = mx.log(mx.floor(place / self.floor_scale) + 1.0) * self.attn_scale + 1.0
        keys, values = cache.update_and_fetch(keys, values)
        attention = vars(llama4)["scaled_dot_product_attention"]  # substituted in that module
        out = attention(
            (queries * scale).astype(queries.dtype),
            keys,
            values,
            cache=cache,
            scale=self.scale,
            mask=mask,
        )
        flat = out.transpose(0, 2, 1, 3).reshape(num_rows, length, -1)
        return self.o_proj(flat)  # type: ignore[no-any-return]


CLASSES = {llama4.LlamaModel: RowsLlamaModel, llama4.Attention: RowsAttention}
