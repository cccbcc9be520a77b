"""What a layer asks of packed rows in a decode step, and what computes it. Knows no rows.

One kernel reads mains where they lie, in one or two launches (gpu/packed_attention.py), or plain
operations gather them first (plain_attention.py): they pass over KV three times, in a dozen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from pippin.backends.mlx.attention.head_ropes import HeadNorms, Rope
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
