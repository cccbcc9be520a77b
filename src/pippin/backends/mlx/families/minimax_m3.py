"""MiniMax M3's choice of blocks with rows of different lengths. Knows no rows, only their columns.

mlx-lm cuts blocks of keys by their columns in the cache, and takes the last columns for those of
the queries. A row's columns are padded, so here blocks are cut by positions: each row chooses what
it would choose alone. This class takes the place of mlx-lm's own in a served model.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import minimax_m3_vl

NOWHERE = 1 << 30  # behind all positions


class RowsAttention(minimax_m3_vl.Attention):
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


CLASSES = {minimax_m3_vl.Attention: RowsAttention}
