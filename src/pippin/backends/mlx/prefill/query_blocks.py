"""Prefill attention whose scores would be too large, in blocks of queries.

Where mlx has no fused kernel for a shape, or has one that it does not use, it computes all scores
at once, [rows, heads, queries, keys]: 2 GB a layer for 2,048 queries and 32,000 keys of 16 heads.
How large they may be is one number for the process, like mlx's own limits of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from pippin.backends.mlx.device import has_matrix_units, on_metal

COPIES = 3  # of the scores, that are alive at a time: as computed, masked, as weights
MOST_BYTES, LEAST_BYTES = 256 << 20, 4 << 20
QUERY_STEP = 32  # blocks are multiples of this: few shapes, and whole tiles of a product
# Head dimensions for which Metal's fused kernel is slower than its products, but for one on M5.
SLOW_FUSED_DIMS = (192, 256)
MATRIX_UNIT_DIM, MATRIX_UNIT_QUERIES = 256, 1024  # from which on mlx takes it itself


@dataclass
class ScoreLimit:
    num_bytes: int = MOST_BYTES

    def fit(self, transient_bytes: float) -> None:
        """Let the scores, with their copies, take half of what activations may take."""
        fitting = int(transient_bytes) // (2 * COPIES)
        self.num_bytes = min(max(fitting, LEAST_BYTES), MOST_BYTES)


LIMIT = ScoreLimit()

Attention = Callable[..., mx.array]  # of queries, keys and values; `mask`


def attend(
    attention: Attention,
    queries: mx.array,  # [B, Hq, S, D]
    keys: mx.array,  # [B, Hkv, L, D]
    values: mx.array,
    mask: Any,  # "causal", None, or an array [..., S or 1, L]
) -> mx.array:
    """`attention`, at once or block by block."""
    batch, heads, num_queries, _ = queries.shape
    query_bytes = batch * heads * keys.shape[2] * queries.dtype.size
    if num_queries * query_bytes <= LIMIT.num_bytes:
        return attention(queries, keys, values, mask=mask)
    fused = _fused(attention, queries, keys, values, mask)
    if fused is not None:
        return fused
    at_a_time = LIMIT.num_bytes // query_bytes // QUERY_STEP * QUERY_STEP or QUERY_STEP
    outs: list[mx.array] = []
    for start in range(0, num_queries, at_a_time):
        stop = min(start + at_a_time, num_queries)
        block, seen = queries[:, :, start:stop], keys.shape[2]
        if isinstance(mask, str):  # nothing after the last of these queries is looked at
            seen += stop - num_queries
        if outs:  # else mlx makes the scores of all blocks before it weighs the first
            (block,) = mx.depends([block], [outs[-1]])
        part = _of_queries(mask, start, stop)
        outs.append(attention(block, keys[:, :, :seen], values[:, :, :seen], mask=part))
    return mx.concatenate(outs, axis=2)


def _fused(
    attention: Attention, queries: mx.array, keys: mx.array, values: mx.array, mask: Any
) -> mx.array | None:
    """The same by a kernel that keeps no scores; None if there is none worth having."""
    slow = on_metal() and queries.shape[-1] in SLOW_FUSED_DIMS
    if slow and not _for_matrix_units(queries, mask):
        return None
    try:
        return attention(queries, keys, values, mask=mask, force_fused=True)
    except ValueError:  # mlx says so at once: nothing has been computed
        return None


def _for_matrix_units(queries: mx.array, mask: Any) -> bool:
    """mlx's own rule (0.32.4, mlx/backend/metal/scaled_dot_product_attention.cpp), without TF32."""
    _, _, num_queries, dim = queries.shape
    large = dim == MATRIX_UNIT_DIM and num_queries >= MATRIX_UNIT_QUERIES
    return large and isinstance(mask, str) and queries.dtype != mx.float32 and has_matrix_units()


def _of_queries(mask: Any, start: int, stop: int) -> Any:
    if not isinstance(mask, mx.array) or mask.ndim < 2 or mask.shape[-2] == 1:
        return mask
    return mask[..., start:stop, :]
