"""Attention of one token per row over keys that lie in pieces. Knows no rows and no cohorts.

    [ shared: one piece for all lines | own: a piece per line | tail ]

Own and tail scores are joined for the softmax. Scores of a shared piece are far more, and stay as
its products leave them: in blocks of keys, with the queries of all lines side by side, so that its
keys and values are read once. The products are small on purpose: larger ones would be spread over
threads, which stall whenever another process needs a core.
"""

from __future__ import annotations

import mlx.core as mx

SHARED_BLOCK = 64  # tokens: what is shared is shared in whole blocks


def attend(
    scores: mx.array,  # [lines, heads, repeats, columns], masked
    tail_scores: mx.array,  # [lines, heads, repeats, TAIL], masked
    values: mx.array,  # [lines, heads, columns, dim]
    sink: mx.array | None,  # [1, heads, repeats, 1]
) -> tuple[mx.array, mx.array]:
    """What the lines get from their own columns, and how they weigh the tail's."""
    columns = values.shape[2]
    weights = softmax([scores, tail_scores], sink)
    return weights[..., :columns] @ values, weights[..., columns:]


def attend_shared(
    shared: mx.array,  # scores [heads, blocks, lines, repeats, SHARED_BLOCK], masked
    scores: mx.array,
    tail_scores: mx.array,
    shared_values: mx.array,  # [1, heads, tokens, dim]
    values: mx.array,
    sink: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """The same where the lines begin alike. Every piece is weighed against the largest score."""
    pieces = [scores, tail_scores] if sink is None else [scores, tail_scores, sink]
    top = shared.max(axis=(1, 4))[..., None].swapaxes(0, 1)
    for piece in pieces:
        top = mx.maximum(top, piece.max(axis=-1, keepdims=True))
    shared_weights = _exp_below(shared, top.swapaxes(0, 1)[:, None])
    total = shared_weights.sum(axis=(1, 4))[..., None].swapaxes(0, 1)
    own, tail, *_ = weights = [_exp_below(piece, top) for piece in pieces]
    for weight in weights:
        total = total + weight.sum(axis=-1, keepdims=True)
    dtype = values.dtype
    out = own.astype(dtype) @ values + _weighed(shared_weights.astype(dtype), shared_values)
    return (out / total).astype(dtype), (tail / total).astype(dtype)


def shared_scores(q: mx.array, keys: mx.array) -> mx.array:
    """q [lines, heads, repeats, dim], keys [1, heads, tokens, dim]: scores as `attend_shared` has
    them, [heads, blocks, lines, repeats, SHARED_BLOCK]."""
    num_lines, heads, repeats, dim = q.shape
    side_by_side = q.swapaxes(0, 1).reshape(heads, 1, num_lines * repeats, dim)
    scores = side_by_side @ _blocks(keys).swapaxes(-1, -2)
    return scores.reshape(heads, -1, num_lines, repeats, SHARED_BLOCK)


def shared_mask(visible: mx.array) -> mx.array:
    """bool [lines, tokens] -> [1, blocks, lines, 1, SHARED_BLOCK]"""
    blocks = visible.reshape(visible.shape[0], -1, SHARED_BLOCK)
    return blocks.swapaxes(0, 1)[None, :, :, None]


def _weighed(weights: mx.array, values: mx.array) -> mx.array:
    """-> [lines, heads, repeats, dim]"""
    heads, num_blocks, num_lines, repeats, _ = weights.shape
    side_by_side = weights.reshape(heads, num_blocks, num_lines * repeats, SHARED_BLOCK)
    out = (side_by_side @ _blocks(values)).sum(axis=1)
    return out.reshape(heads, num_lines, repeats, -1).swapaxes(0, 1)


def _blocks(piece: mx.array) -> mx.array:
    """[1, heads, tokens, dim] -> [heads, blocks, SHARED_BLOCK, dim]"""
    return piece.reshape(piece.shape[1], -1, SHARED_BLOCK, piece.shape[3])


def masked(scores: mx.array, visible: mx.array | None) -> mx.array:
    if visible is None:
        return scores
    return mx.where(visible, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))


def softmax(scores: list[mx.array], sink: mx.array | None) -> mx.array:
    """Over all pieces together; a sink takes weight but gives no value."""
    if sink is not None:
        scores = [*scores, mx.broadcast_to(sink, (*scores[0].shape[:-1], 1))]
    joined = scores[0] if len(scores) == 1 else mx.concatenate(scores, axis=-1)
    weights = mx.softmax(joined, axis=-1, precise=True)
    return weights if sink is None else weights[..., :-1]


def _exp_below(scores: mx.array, top: mx.array) -> mx.array:
    return mx.exp(scores.astype(mx.float32) - top.astype(mx.float32))
