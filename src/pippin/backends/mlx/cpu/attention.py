"""Prefill attention on CPUs: few passes over the scores, and a vector exp. Knows no model.

mlx's fused attention is for GPUs; on a CPU it falls back to operations whose softmax calls the C
library's exp once per score. Here the weights stay unnormalised until they have met the values.

Scores are computed transposed, keys by queries: the largest of a query's and their sum are then
found for a whole line of queries at a time, which mlx does two to three times as fast.
"""

from __future__ import annotations

import mlx.core as mx

from pippin.backends.mlx.cpu.activations import unnormalised_softmax
from pippin.backends.mlx.cpu.operations.calls import are_float32, operations

BLOCKED = -1e30
QUERIES = 32  # taken at a time: their scores stay near the core, and no buffer is enormous


def attend(
    queries: mx.array,  # [B, Hq, S, D]
    keys: mx.array,  # [B, Hkv, L, D]
    values: mx.array,  # [B, Hkv, L, Dv]
    scale: float,
    mask: mx.array | str | None,  # bool or added [B or 1, H or 1, S, L]; "causal"; None
) -> mx.array:
    ours = operations("attention")
    if ours is not None and are_float32(queries, keys, values) and _is_simple(mask, queries, keys):
        allowed = None if isinstance(mask, str) else mask
        return ours.attention(queries, keys, values, scale, allowed, causal=isinstance(mask, str))
    num_queries, num_keys = queries.shape[2], keys.shape[2]
    outs: list[mx.array] = []
    for start in range(0, num_queries, QUERIES):
        stop = min(start + QUERIES, num_queries)
        # Under a causal mask nothing after the last of these queries is looked at.
        seen = num_keys - num_queries + stop if isinstance(mask, str) else num_keys
        part = mask if mask is None or isinstance(mask, str) else mask[..., start:stop, :]
        block = queries[:, :, start:stop]
        if outs:  # else mlx takes all blocks through an operation, then all through the next one
            (block,) = mx.depends([block], [outs[-1]])
        outs.append(_attend(block, keys[:, :, :seen], values[:, :, :seen], scale, part))
    return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)


def _is_simple(mask: mx.array | str | None, queries: mx.array, keys: mx.array) -> bool:
    """The same for all heads, and nothing is added."""
    if mask is None or isinstance(mask, str):
        return True
    each_row = (queries.shape[0], 1, queries.shape[2], keys.shape[2])
    return bool(mask.dtype == mx.bool_) and mask.shape in (each_row, (1, *each_row[1:]))


def _attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
) -> mx.array:
    batch, q_heads, num_queries, dim = queries.shape
    kv_heads, num_keys = keys.shape[1:3]
    repeats = q_heads // kv_heads
    q = (queries * scale).reshape(batch, kv_heads, repeats * num_queries, dim)
    scores = keys @ q.swapaxes(-1, -2)
    bias = _bias(mask, num_queries, num_keys)
    if bias is not None:
        if bias.ndim == 4 and bias.shape[1] == q_heads > 1:
            bias = bias.reshape(bias.shape[0], kv_heads, repeats, num_keys, num_queries)
            bias = bias.swapaxes(2, 3)
        elif bias.ndim == 4:
            bias = bias[:, :, :, None]
        else:
            bias = bias[:, None]
        apart = scores.reshape(batch, kv_heads, num_keys, repeats, num_queries)
        scores = (apart + bias).reshape(scores.shape)
    weights = unnormalised_softmax(scores, axis=-2)
    total = weights.sum(axis=-2)[..., None]
    out = (weights.swapaxes(-1, -2) @ values) / total
    return out.reshape(batch, q_heads, num_queries, -1).astype(queries.dtype)


def _bias(mask: mx.array | str | None, num_queries: int, num_keys: int) -> mx.array | None:
    """What is added to the scores, transposed as they are."""
    if mask is None:
        return None
    if isinstance(mask, str):
        last_seen = mx.arange(num_keys - num_queries, num_keys)
        mask = mx.arange(num_keys)[:, None] <= last_seen
    else:
        mask = mx.contiguous(mask.swapaxes(-1, -2))
    if mask.dtype == mx.bool_:
        return mx.where(mask, 0.0, BLOCKED)
    return mask
