"""Code in place of mlx-lm's, for families that need it. (refusals.py: those that are not served.)

Llama 4's and MiniMax M3's own code counts on one position for all rows, which no cache view can
answer; with mlx-lm's own caches these classes do what it did.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import llama4, minimax_m3_vl
from mlx_lm.models.base import create_attention_mask

FULL_EVERY = 4  # every fourth layer sees all chunks; mlx-lm has the number in its code, too


class Llama4Model(llama4.LlamaModel):
    """mlx-lm's code makes its mask, and the scale of its queries, of ranges of positions that are
    Python integers, the same for all rows."""

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


class Llama4Attention(llama4.Attention):
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


NOWHERE = 1 << 30  # behind all positions


class MiniMaxM3Attention(minimax_m3_vl.Attention):
    """mlx-lm cuts blocks of keys by their columns in the cache, and takes the last columns for
    those of the queries. A row's columns are padded, so here blocks are cut by positions: each row
    chooses what it would choose alone."""

    def _block_mask(self: Any, x: mx.array, mask: Any, offset: Any, cache: Any) -> Any:
        if not hasattr(cache, "positions"):
            return super()._block_mask(x, mask, offset, cache)
        num_rows, length, _ = x.shape
        keys = self.index_k_proj(x).reshape(num_rows, length, 1, self.index_head_dim)
        keys = self.index_rope(self.index_k_norm(keys).transpose(0, 2, 1, 3), offset=offset)
        keys, _ = cache.update_and_fetch(keys, keys[..., :0])
        columns = keys.shape[2]
        num_blocks = -(-columns // self.index_block_size)
        if self.index_topk_blocks >= num_blocks:
            return mask
        queries = self.index_q_proj(x).reshape(num_rows, length, self.index_n_heads, -1)
        queries = self.index_rope(self.index_q_norm(queries).transpose(0, 2, 1, 3), offset=offset)
        position = cache.positions()  # of each column, [rows, columns]; below 0: no token's
        asking = (mx.array(offset).reshape(-1, 1) + mx.arange(length))[:, None, :, None]
        at = position[:, None, None]
        visible = mask if isinstance(mask, mx.array) else (at >= 0) & (at <= asking)
        scores = queries.astype(mx.float32) @ keys.astype(mx.float32).swapaxes(-1, -2)
        chosen = self._choose(mx.where(visible, scores, -mx.inf), position, asking, num_blocks)
        seen = mx.take_along_axis(chosen, mx.maximum(at, 0) // self.index_block_size, axis=-1)
        return mx.repeat(seen & visible, self.num_attention_heads // self.index_n_heads, axis=1)

    def _choose(
        self: Any, scores: mx.array, position: mx.array, asking: mx.array, num_blocks: int
    ) -> mx.array:
        """Which blocks of positions the queries see: bool [rows, heads, queries, blocks].

        `scores` [rows, heads, queries, columns], `asking` [rows, 1, queries, 1]: their positions.
        """
        order = mx.argsort(mx.where(position < 0, NOWHERE, position), axis=-1)[:, None, None]
        by_position = mx.take_along_axis(scores, order, axis=-1)
        missing = num_blocks * self.index_block_size - by_position.shape[-1]
        by_position = mx.pad(by_position, [(0, 0)] * 3 + [(0, missing)], constant_values=-mx.inf)
        blocks = mx.unflatten(by_position, -1, (num_blocks, self.index_block_size)).max(axis=-1)
        block, own = mx.arange(num_blocks), asking // self.index_block_size
        is_local = (block <= own) & (block > own - self.index_local_blocks)
        blocks = mx.where(is_local, mx.inf, blocks)
        topk = self.index_topk_blocks
        best = mx.argpartition(-blocks, kth=topk - 1, axis=-1)[..., :topk]
        none = mx.zeros(blocks.shape, mx.bool_)
        return mx.put_along_axis(none, best, mx.array(True), axis=-1)


CLASSES = {
    llama4.LlamaModel: Llama4Model,
    llama4.Attention: Llama4Attention,
    minimax_m3_vl.Attention: MiniMaxM3Attention,
}


def use_rows_code(model: Module) -> None:
    for _, part in model.named_modules():
        if type(part) in CLASSES:
            part.__class__ = CLASSES[type(part)]
