"""Attention of a token of each row over packed latents (MLA): one or two kernels.

    a column:   [ latent: keys and values of all heads | rotated key ]

All heads of queries read the same columns. So a block of threads fetches a few columns at a time
for a SIMD group of each few heads, and no head is added up across SIMD groups. Blocks take a row's
stretches as packed_attention.py cuts them, and its second kernel adds these up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from pippin.backends.mlx.attention.head_ropes import Rope
from pippin.backends.mlx.attention.paths import MOST_SEGMENTS, PackedCall
from pippin.backends.mlx.device import gpu_cores
from pippin.backends.mlx.gpu.latent_kernel import ATTEND_LATENTS
from pippin.backends.mlx.gpu.packed_attention import (
    FEWEST_THREADS,
    MOST_STATE,
    SHORTEST_STRETCH,
    add_up_kernel,
    no_columns,
    number,
    remembered_numbers,
)
from pippin.backends.mlx.gpu.packed_kernels import HEADER
from pippin.backends.mlx.layout import LayerCache

MOST_WARPS = 8  # SIMD groups of a block; not measured on Apple GPUs
TILE_BYTES = 18_432  # of the columns that a block has in threadgroup memory
MOST_COLUMNS = 16  # of these
AHEAD = 2  # columns whose scores are computed together
# A block has a few hundred threads of some hundred registers: a core has registers for two of them.
BLOCKS_PER_CORE = 3


@dataclass(frozen=True)
class LatentForm:
    """How the kernel is cut for one shape of layer."""

    queries: int  # heads of queries of a SIMD group
    warps: int  # SIMD groups of a block
    blocks: int  # for all heads of a row
    tile: int  # columns
    vec: int  # channels that are read at a time

    @classmethod
    def of(cls, num_heads: int, dims: tuple[int, int], size: int) -> LatentForm:
        """`dims`: channels of a latent and of a rotated key; `size`: bytes of a number."""
        latent, rotated = (dim // 32 for dim in dims)  # of a lane
        state = latent * size / 4 + rotated + latent  # its queries, and its sums
        queries = next(n for n in (4, 2, 1) if num_heads % n == 0 and n * state <= MOST_STATE)
        num_warps = num_heads // queries
        blocks = -(-num_warps // MOST_WARPS)
        vec = next(n for n in (8, 4, 2, 1) if n * size <= 16 and latent % n == 0)
        tile = min(TILE_BYTES // (sum(dims) * size), MOST_COLUMNS) // AHEAD * AHEAD
        return cls(queries, -(-num_warps // blocks), blocks, tile, vec)


def takes(cache: LayerCache) -> bool:
    """Whether the kernel is for such a layer."""
    (heads, latent), (other_heads, rotated) = cache.shapes
    whole = latent % 32 == 0 and rotated % 32 == 0 and heads == other_heads == 1
    small = 2 * latent + rotated <= 32 * MOST_STATE
    return whole and small and len(set(cache.dtypes)) == 1


@cache
def _kernel() -> Callable[..., list[mx.array]]:
    make: Callable[..., Callable[..., list[mx.array]]] = mx.fast.metal_kernel  # type: ignore[assignment]
    return make(
        name="pippin_attend_latents",
        input_names=[
            *("q", "p", "k", "r", "tail_k", "tail_v"),
            *(f"main_{side}{n}" for n in range(MOST_SEGMENTS) for side in "kv"),
            *("places", "visible_tail", "cursor", "positions", "numbers"),
        ],
        output_names=["out", "weights", "new_tail_k", "new_tail_v"],
        source=ATTEND_LATENTS,
        header=HEADER,
        ensure_row_contiguous=False,
    )


def _numbers(scale: float, ropes: tuple[Rope, Rope] | None) -> mx.array:
    """Scale of latents, gains of rotated queries and keys, and angles."""
    gains = [1.0, 1.0] if ropes is None else [rope.gain for rope in ropes]
    rope = None if ropes is None else ropes[1]
    freqs = [] if rope is None or rope.freqs is None else [rope.freqs]
    rotation = None if rope is None else (rope.dims, rope.base, rope.scale)

    def make() -> list[mx.array]:
        return [mx.array([scale, *gains, *[0.0] * 5]), *([] if rope is None else [rope.angles()])]

    return remembered_numbers(("latents", scale, *gains, rotation), freqs, make)


def num_stretches(num_blocks: int, num_columns: int) -> int:
    """Of each row. `num_blocks`: of all rows."""
    most = num_columns // SHORTEST_STRETCH
    return max(1, min(most, BLOCKS_PER_CORE * gpu_cores() // num_blocks))


def attend_latents(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
    assert call.rotated is not None, "rows of latents have rotated keys"
    assert call.sinks is None, "latents have no sinks"
    q, tail = call.q, call.tail
    num_rows, num_heads, num_tokens, dim = q.shape
    assert num_tokens == 1, "drafts of rows of latents are not verified"
    rotated_dim = call.rotated.shape[-1]
    form = LatentForm.of(num_heads, (dim, rotated_dim), q.dtype.size)
    threads = 32 * form.warps
    num_splits = num_stretches(num_rows * form.blocks, call.num_columns)
    whole = num_splits == 1
    rope = None if call.ropes is None else call.ropes[1]
    positions = call.cursor if call.positions is None else call.positions
    parts = (num_rows, num_heads, 1)
    mains = [side for pair in call.mains for side in pair]
    mains += no_columns(1, dim, rotated_dim, q.dtype) * (MOST_SEGMENTS - len(call.mains))
    out, weights, tail_k, tail_v = _kernel()(
        inputs=[
            *(q, call.rotated, call.k, call.v, *tail, *mains),
            *(call.places, call.visible_tail, call.cursor, positions),
            _numbers(call.scale, call.ropes),
        ],
        template=[
            ("T", q.dtype),
            ("O", q.dtype if whole else mx.float32),
            ("D", dim),
            ("R", rotated_dim),
            ("Heads", num_heads),
            ("Threads", threads),
            ("Tail", call.visible_tail.shape[-1]),
            ("Queries", form.queries),
            ("Tile", form.tile),
            ("Vec", form.vec),
            ("Ahead", AHEAD),
            ("Rotated", 0 if rope is None else rope.dims),
            ("Traditional", rope is not None and rope.traditional),
            ("Whole", whole),
        ],
        grid=(threads * num_splits, form.blocks, num_rows),
        threadgroup=(threads, 1, 1),
        output_shapes=[
            (*parts, dim) if whole else (*parts, num_splits, dim),
            (1,) if whole else (*parts, num_splits, 2),
            tail[0].shape,
            tail[1].shape,
        ],
        output_dtypes=[q.dtype if whole else mx.float32, mx.float32, q.dtype, q.dtype],
    )
    if not whole:
        (out,) = add_up_kernel()(
            inputs=[out, weights, number(0.0)],
            template=[("T", q.dtype), ("Dv", dim), ("Sinks", False), ("Threads", FEWEST_THREADS)],
            grid=(FEWEST_THREADS * num_rows * num_heads, 1, 1),
            threadgroup=(FEWEST_THREADS, 1, 1),
            output_shapes=[(*parts, dim)],
            output_dtypes=[q.dtype],
        )
    return out, tail_k, tail_v
