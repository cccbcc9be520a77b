"""Attention over packed mains in plain operations: what gpu/packed_attention.py does by a kernel.

What that kernel is checked against, and what runs instead of it where that is faster. A column
that a row does not see weighs nothing, and nothing times infinity is not a number: so a row reads
columns of its own in place of others'.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from pippin.backends.mlx.attention.paths import AttendPacked, PackedCall
from pippin.backends.mlx.attention.split_attention import attend, masked
from pippin.backends.mlx.payloads.packing import KV


def attend_joined(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
    """Each row's columns and its tail as one array, for mlx's own attention."""
    main, places = call.main, call.places
    new_tail = _new_tail(call)
    if call.q.shape[0] == 1:
        visible = _visible_of_one(call)
        own = [side[None] for side in main]
    else:
        column = mx.arange(call.num_columns)
        at = places[:, :1] + mx.minimum(column, places[:, 1:] - 1)
        own = [mx.take(side, mx.maximum(at, 0), axis=1).swapaxes(0, 1) for side in main]
        visible = column < places[:, 1:]
    keys, values = (
        mx.concatenate([mine, late], axis=2) for mine, late in zip(own, new_tail, strict=True)
    )
    mask = mx.concatenate([visible, call.visible_tail], axis=1)[:, None, None]
    out = mx.fast.scaled_dot_product_attention(
        call.q, keys, values, scale=call.scale, mask=mask, sinks=call.sinks
    )
    return out, *new_tail


def held_against_plain(kernel: AttendPacked, errors: list[mx.array]) -> AttendPacked:
    """`kernel`, with how far off each of its results is, of the largest number in it.

    Plain operations get the same numbers in float32: rounded to half as many bits, scores alone
    would be off by more than a kernel may be.
    """

    def attend_and_compare(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
        found = kernel(call)
        for ours, plain in zip(found, attend_joined(_in_float32(call)), strict=True):
            difference = mx.abs(ours.astype(mx.float32) - plain).max()
            errors.append(difference / mx.maximum(mx.abs(plain).max(), 1e-6))
        return found

    return attend_and_compare


def attend_in_pieces(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
    """The only row's columns and its tail where they lie."""
    new_keys, new_values = _new_tail(call)
    _, num_query_heads, _, dim = call.q.shape
    num_heads = call.k.shape[1]
    q = (call.q * call.scale).reshape(1, num_heads, num_query_heads // num_heads, dim)
    keys, values = call.main[0][None], call.main[1][None]
    scores = masked(q @ keys.swapaxes(-1, -2), _visible_of_one(call)[:, None, None])
    tail_scores = masked(q @ new_keys.swapaxes(-1, -2), call.visible_tail[:, None, None])
    sink = None
    if call.sinks is not None:
        sink = call.sinks.astype(q.dtype).reshape(1, num_heads, -1, 1)
    out, weights = attend(scores, tail_scores, values, sink)
    out = out + weights @ new_values
    return out.reshape(1, num_query_heads, 1, -1), new_keys, new_values


def _in_float32(call: PackedCall) -> PackedCall:
    q, k, v, *sides = (
        array.astype(mx.float32) for array in (call.q, call.k, call.v, *call.tail, *call.main)
    )
    tail, main = (sides[0], sides[1]), (sides[2], sides[3])
    sinks = None if call.sinks is None else call.sinks.astype(mx.float32)
    return replace(call, q=q, k=k, v=v, tail=tail, main=main, sinks=sinks)


def _new_tail(call: PackedCall) -> KV:
    keys, values = (
        mx.slice_update(old, new, call.cursor, (2,))
        for old, new in zip(call.tail, (call.k, call.v), strict=True)
    )
    return keys, values


def _visible_of_one(call: PackedCall) -> mx.array:
    """bool [1, columns]: all that lies there is the only row's, or a copy of it, or zero."""
    first, num_visible = call.places[:, :1], call.places[:, 1:]
    column = mx.arange(call.main[0].shape[1])
    return (column >= first) & (column < first + num_visible)
