"""What each of several tokens of a row sees of its packed columns and its tail. Knows no layer.

[ main ............ | tail: held | token 0 | token 1 | ... ]
          [ window of token 0              ]
            [ window of token 1                      ]
"""

from __future__ import annotations

import mlx.core as mx


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
