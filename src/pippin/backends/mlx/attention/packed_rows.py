"""What a layer asks of packed rows in a decode step, and what computes it.

One kernel reads mains where they lie, in one or two launches (gpu/packed_attention.py), or plain
operations gather each row's columns first: they pass over KV three times, in a dozen launches, and
kernels are checked against them. A column that a row does not see weighs nothing, and nothing times
infinity is not a number: so a row reads columns of its own in place of others'.

What each of several tokens of a row sees of its columns and its tail:

    [ main ............ | tail: held | token 0 | token 1 | ... ]
              [ window of token 0              ]
                [ window of token 1                      ]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from pippin.backends.mlx.attention.head_ropes import HeadNorms, Rope
from pippin.backends.mlx.gpu.kernels import off_by
from pippin.backends.mlx.payloads.packing import KV

MOST_SEGMENTS = 4  # of the mains of packed rows: a kernel has an argument for each


@dataclass(frozen=True)
class PackedCall:
    """What a layer asks of packed rows in one step."""

    q: mx.array  # [rows, query heads, tokens, D]
    k: mx.array  # [rows, heads, tokens, D]: this step's
    v: mx.array  # [rows, heads, tokens, Dv]
    tail: KV  # [rows, heads, TAIL, D or Dv]
    mains: Sequence[KV]  # by segment: [heads, columns, D or Dv]
    # Of each row, and of each of its tokens where there are several:
    places: mx.array  # int32 [.., segments, 2]: where its columns begin, and how many it sees
    visible_tail: mx.array  # bool [.., TAIL]
    cursor: mx.array  # int32 [rows]: the tail column of the first token
    scale: float
    sinks: mx.array | None
    num_columns: int  # of the longest row, or more
    positions: mx.array | None = None  # int32 [rows]: where each row's token stands
    ropes: tuple[Rope, Rope] | None = None  # what is yet to be done to `q` and to `k`
    # Of latents, [rows, query heads, 1, R]: scaled queries of the rotated keys. `k` are then
    # latents, keys and values at once, `v` rotated keys; `ropes` are of these two.
    rotated: mx.array | None = None


# What the rows attend to, [rows, query heads, tokens, Dv], and the new tails.
AttendPacked = Callable[[PackedCall], tuple[mx.array, mx.array, mx.array]]


@dataclass(frozen=True, eq=False)
class AttentionPaths:
    """Without a kernel rows are joined, or an operation reads them by a table."""

    kernel: AttendPacked | None = None
    # Rotations are left to attention over packed rows, with these norms before them.
    norms: HeadNorms | None = None
    adds_later: bool = False  # a layer's sums are left to the norms that follow


def places_of_tokens(places: mx.array, columns: mx.array, window: int | None) -> mx.array:
    """int32 [rows, tokens, segments, 2] of `places` [rows, segments, 2], of which a window hides
    the first columns. `columns` int32 [rows, tokens]: of the tail, the tokens' own."""
    shape = (*columns.shape, *places.shape[1:])
    if window is None:
        return mx.contiguous(mx.broadcast_to(places[:, None], shape))
    starts, counts = places[:, None, :, 0], places[:, None, :, 1]
    before = mx.cumsum(counts, axis=-1, inclusive=False)
    num_seen = mx.maximum(window - 1 - columns, 0)[..., None]
    num_hidden = mx.maximum(counts.sum(axis=-1, keepdims=True) - num_seen, 0)
    here = mx.clip(num_hidden - before, 0, counts)
    return mx.stack([starts + here, counts - here], axis=-1)


def visible_to_tokens(columns: mx.array, window: int | None, tail_len: int) -> mx.array:
    """bool [rows, tokens, tail_len]"""
    age = columns[..., None] - mx.arange(tail_len)
    return age >= 0 if window is None else (age >= 0) & (age < window)


LONG = 2048  # columns


def attend_joined(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
    """Each row's columns and its tail as one array, for mlx's own attention."""
    call = _rotated(call)
    new_tail = with_columns(call.tail, call.k, call.v, call.cursor)
    at, visible = _seen_columns(call)
    keys, values = (
        mx.concatenate([gathered(list(parts), at), late], axis=2)
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


def columns_of_rows(
    places: mx.array, sizes: Sequence[int], num_columns: int
) -> tuple[mx.array, mx.array]:
    """int32 [rows, num_columns]: where each column of a row is among those of all segments, of
    these sizes; [rows, 1]: how many it has. `places` int32 [rows, segments, 2]."""
    starts, counts = places[..., 0], places[..., 1]
    column = mx.arange(num_columns)[None]
    at = before = mx.zeros((len(places), 1), mx.int32)
    for number in range(len(sizes)):
        start, count = starts[:, number : number + 1], counts[:, number : number + 1]
        # Past its columns a row reads its last one again, also where a window has passed them all.
        own = mx.minimum(column - before, count - 1) + start + sum(sizes[:number])
        at = mx.where((column >= before) & (start + count > 0), own, at)
        before = before + count
    return at, before


def gathered(parts: Sequence[mx.array], at: mx.array) -> mx.array:
    """[heads, columns, dim] each -> [rows, heads, columns, dim]"""
    return columns_at(parts, at).swapaxes(0, 1)


def columns_at(parts: Sequence[mx.array], at: mx.array) -> mx.array:
    """[heads, columns, dim] each -> [heads, *at.shape, dim]"""
    joined = parts[0] if len(parts) == 1 else mx.concatenate(list(parts), axis=1)
    heads, _, dim = joined.shape
    if not dim:  # of what is kept once
        return mx.zeros((heads, *at.shape, dim), joined.dtype)
    return mx.take(joined, at, axis=1)


def _seen_columns(call: PackedCall) -> tuple[mx.array, mx.array]:
    """As `columns_of_rows` has them, and bool [rows, tokens, columns]: whether a token sees it. The
    first token sees all that others see."""
    num_rows, num_tokens = call.q.shape[0], call.q.shape[2]
    places = call.places.reshape(num_rows, num_tokens, -1, 2)
    sizes = [keys.shape[1] for keys, _ in call.mains]
    at, num_held = columns_of_rows(places[:, 0], sizes, call.num_columns)
    column = mx.arange(call.num_columns)[None]
    passed = num_held - places[..., 1].sum(axis=-1)  # by a later token's window
    return at, (column < num_held)[:, None] & (column[None] >= passed[..., None])


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


def of_long_rows(call: PackedCall) -> PackedCall:
    """The same asked of rows so long that a kernel cuts them into stretches, of drawn numbers."""
    num_rows = len(call.q)
    keys, values = (
        mx.random.normal((heads, num_rows * LONG, dim), side.dtype, key=mx.random.key(dim))
        for side in call.tail
        for heads, dim in [(side.shape[1], side.shape[3])]
    )
    places = np.zeros(call.places.shape, np.int32)
    places[:, 0] = [(row * LONG, LONG) for row in range(num_rows)]
    return replace(call, mains=[(keys, values)], places=mx.array(places), num_columns=LONG)


def of_drafts(call: PackedCall, num_tokens: int = 3) -> PackedCall:
    """The same asked of rows that verify drafts, of drawn numbers: a kernel has a form for them."""

    def drawn(side: mx.array, seed: int) -> mx.array:
        shape = (*side.shape[:2], num_tokens, side.shape[3])
        return mx.random.normal(shape, side.dtype, key=mx.random.key(seed))

    own = call.cursor[:, None] + mx.arange(num_tokens)
    return replace(
        call,
        q=drawn(call.q, 1),
        k=drawn(call.k, 2),
        v=drawn(call.v, 3),
        places=places_of_tokens(call.places, own, None),
        visible_tail=visible_to_tokens(own, None, call.tail[0].shape[2]),
    )


def _in_float32(call: PackedCall) -> PackedCall:
    def widened(part: Any) -> Any:
        is_float = isinstance(part, mx.array) and mx.issubdtype(part.dtype, mx.floating)
        return part.astype(mx.float32) if is_float else part

    return PackedCall(**tree_map(widened, vars(call)))


def with_columns(tail: KV, k: mx.array, v: mx.array, cursor: mx.array) -> KV:
    """The tails with new columns, each row's from its cursor on; those that have no place in the
    tail are left out."""
    tail_len, last = tail[0].shape[2], k.shape[2] - 1
    age = mx.arange(tail_len)[None] - cursor[:, None]
    is_new, at = (age >= 0) & (age <= last), mx.clip(age, 0, last)
    is_new, at = (array[:, None, :, None] for array in (is_new, at))
    keys, values = (
        mx.where(is_new, mx.take_along_axis(new, at, axis=2) if last else new, old)
        for old, new in zip(tail, (k, v), strict=True)
    )
    return keys, values
