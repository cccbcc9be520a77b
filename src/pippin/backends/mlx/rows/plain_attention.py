"""Attention over packed mains in plain operations: what gpu/packed_attention.py does by a kernel.

What that kernel is checked against, and what runs instead of it where that is faster. A column
that a row does not see weighs nothing, and nothing times infinity is not a number: so a row reads
columns of its own in place of others'.
"""

from __future__ import annotations

import mlx.core as mx

from pippin.backends.mlx.rows.split_attention import attend
from pippin.backends.mlx.tree.packing import KV


def attend_joined(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    tail: KV,
    main: KV,
    places: mx.array,
    visible_tail: mx.array,
    cursor: mx.array,
    scale: float,
    sinks: mx.array | None,
    num_columns: int,
) -> tuple[mx.array, mx.array, mx.array]:
    """Each row's columns and its tail as one array, for mlx's own attention."""
    new_tail = _written(tail, (k, v), cursor)
    if q.shape[0] == 1:
        visible = _visible_of_one(main, places)
        own = [side[None] for side in main]
    else:
        column = mx.arange(num_columns)
        at = places[:, :1] + mx.minimum(column, places[:, 1:] - 1)
        own = [mx.take(side, mx.maximum(at, 0), axis=1).swapaxes(0, 1) for side in main]
        visible = column < places[:, 1:]
    keys, values = (
        mx.concatenate([mine, late], axis=2) for mine, late in zip(own, new_tail, strict=True)
    )
    mask = mx.concatenate([visible, visible_tail], axis=1)[:, None, None]
    out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=mask, sinks=sinks)
    return out, *new_tail


def attend_in_pieces(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    tail: KV,
    main: KV,
    places: mx.array,
    visible_tail: mx.array,
    cursor: mx.array,
    scale: float,
    sinks: mx.array | None,
    num_columns: int,
) -> tuple[mx.array, mx.array, mx.array]:
    """The only row's columns and its tail where they lie."""
    new_keys, new_values = _written(tail, (k, v), cursor)
    _, num_query_heads, _, dim = q.shape
    num_heads = k.shape[1]
    q = (q * scale).reshape(1, num_heads, num_query_heads // num_heads, dim)
    blocked = mx.array(mx.finfo(q.dtype).min, q.dtype)
    keys, values = main[0][None], main[1][None]
    visible = _visible_of_one(main, places)[:, None, None]
    scores = mx.where(visible, q @ keys.swapaxes(-1, -2), blocked)
    visible = visible_tail[:, None, None]
    tail_scores = mx.where(visible, q @ new_keys.swapaxes(-1, -2), blocked)
    sink = None if sinks is None else sinks.astype(q.dtype).reshape(1, num_heads, -1, 1)
    out, weights = attend(scores, tail_scores, values, sink)
    out = out + weights @ new_values
    return out.reshape(1, num_query_heads, 1, -1), new_keys, new_values


def _written(tail: KV, new: KV, cursor: mx.array) -> KV:
    keys, values = (
        mx.slice_update(old, late, cursor, (2,)) for old, late in zip(tail, new, strict=True)
    )
    return keys, values


def _visible_of_one(main: KV, places: mx.array) -> mx.array:
    """bool [1, columns]: all that lies there is the only row's, or a copy of it, or zero."""
    column = mx.arange(main[0].shape[1])
    return (column >= places[:, :1]) & (column < places[:, :1] + places[:, 1:])
