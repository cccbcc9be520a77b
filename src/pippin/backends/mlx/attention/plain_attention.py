"""Attention over packed mains in plain operations: what gpu/packed_attention.py does by a kernel.

What that kernel is checked against, and what runs instead of it where that is faster. A column
that a row does not see weighs nothing, and nothing times infinity is not a number: so a row reads
columns of its own in place of others'.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from pippin.backends.mlx.agreement import off_by
from pippin.backends.mlx.attention.paths import AttendPacked, PackedCall
from pippin.backends.mlx.payloads.packing import KV


def attend_joined(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
    """Each row's columns and its tail as one array, for mlx's own attention."""
    call = _rotated(call)
    new_tail = _new_tail(call)
    at, visible = _columns_of_rows(call)
    keys, values = (
        mx.concatenate([_gathered(list(parts), at), late], axis=2)
        for parts, late in zip(zip(*call.mains, strict=True), new_tail, strict=True)
    )
    tail = call.visible_tail.reshape(*visible.shape[:2], -1)
    mask = mx.concatenate([visible, tail], axis=-1)[:, None]
    q, scale = call.q, call.scale
    if call.rotated is not None:
        q, scale = mx.concatenate([q * scale, call.rotated.astype(q.dtype)], axis=-1), 1.0
        keys, values = mx.concatenate([keys, values], axis=-1), keys
    out = mx.fast.scaled_dot_product_attention(
        q, keys, values, scale=scale, mask=mask, sinks=call.sinks
    )
    return out, *new_tail


def _rotated(call: PackedCall) -> PackedCall:
    """With nothing left to be done to queries and keys."""
    if call.ropes is None:
        return call
    assert call.positions is not None
    of_queries, of_keys = call.ropes
    if call.rotated is not None:
        rotated = of_queries.apply(call.rotated, call.positions)
        return replace(call, rotated=rotated, v=of_keys.apply(call.v, call.positions), ropes=None)
    q, k = of_queries.apply(call.q, call.positions), of_keys.apply(call.k, call.positions)
    return replace(call, q=q, k=k, ropes=None)


def _columns_of_rows(call: PackedCall) -> tuple[mx.array, mx.array]:
    """int32 [rows, columns]: where each column of a row is among those of all segments; bool
    [rows, tokens, columns]: whether a token sees it. The first token sees all that others see."""
    sizes = [keys.shape[1] for keys, _ in call.mains]
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    num_rows, num_tokens = call.q.shape[0], call.q.shape[2]
    places = call.places.reshape(num_rows, num_tokens, -1, 2)
    starts, counts = places[:, 0, :, 0], places[:, 0, :, 1]
    column = mx.arange(call.num_columns)[None]
    at = before = mx.zeros((num_rows, 1), mx.int32)
    for number, offset in enumerate(offsets):
        start, count = starts[:, number : number + 1], counts[:, number : number + 1]
        # Past its columns a row reads its last one again, also where a window has passed them all.
        own = mx.minimum(column - before, count - 1) + start + offset
        at = mx.where((column >= before) & (start + count > 0), own, at)
        before = before + count
    passed = before - places[..., 1].sum(axis=-1)  # by a later token's window
    return at, (column < before)[:, None] & (column[None] >= passed[..., None])


def _gathered(parts: list[mx.array], at: mx.array) -> mx.array:
    """[heads, columns, dim] each -> [rows, heads, columns, dim]"""
    return mx.take(mx.concatenate(parts, axis=1), at, axis=1).swapaxes(0, 1)


def held_against_plain(kernel: AttendPacked, errors: list[mx.array]) -> AttendPacked:
    """`kernel`, with how far off each of its results is, of the largest number in it.

    Plain operations get the same numbers in float32: rounded to half as many bits, scores alone
    would be off by more than a kernel may be.
    """

    def attend_and_compare(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
        found = kernel(call)
        for ours, plain in zip(found, attend_joined(_in_float32(call)), strict=True):
            errors.append(off_by(ours, plain))
        return found

    return attend_and_compare


def _in_float32(call: PackedCall) -> PackedCall:
    q, k, v = (array.astype(mx.float32) for array in (call.q, call.k, call.v))
    tail, *mains = (
        (keys.astype(mx.float32), values.astype(mx.float32))
        for keys, values in (call.tail, *call.mains)
    )
    sinks = None if call.sinks is None else call.sinks.astype(mx.float32)
    rotated = None if call.rotated is None else call.rotated.astype(mx.float32)
    return replace(call, q=q, k=k, v=v, tail=tail, mains=mains, sinks=sinks, rotated=rotated)


def _new_tail(call: PackedCall) -> KV:
    if call.cursor.size == 1 and call.k.shape[2] == 1:
        keys, values = (
            mx.slice_update(old, new, call.cursor, (2,))
            for old, new in zip(call.tail, (call.k, call.v), strict=True)
        )
        return keys, values
    tail_len, last = call.tail[0].shape[2], call.k.shape[2] - 1
    age = mx.arange(tail_len)[None] - call.cursor[:, None]
    is_new, at = (age >= 0) & (age <= last), mx.clip(age, 0, last)
    is_new, at = (array[:, None, :, None] for array in (is_new, at))
    keys, values = (
        mx.where(is_new, mx.take_along_axis(new, at, axis=2), old)
        for old, new in zip(call.tail, (call.k, call.v), strict=True)
    )
    return keys, values
