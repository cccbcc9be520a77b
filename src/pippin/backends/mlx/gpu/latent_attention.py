"""Attention of a token of each row over packed latents (MLA): one or two kernels.

    a column:   [ latent: keys and values of all heads | rotated key ]

All heads of queries read the same columns. So a block of threads fetches a few columns at a time
for a SIMD group of each few heads, and no head is added up across SIMD groups. Blocks take a row's
stretches as packed_attention.py cuts them, and its second kernel adds these up.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from pippin.backends.mlx.attention.head_ropes import Rope
from pippin.backends.mlx.attention.paths import PackedCall
from pippin.backends.mlx.device import gpu_cores
from pippin.backends.mlx.gpu.kernels import metal_kernel
from pippin.backends.mlx.gpu.latent_kernel import ATTEND_LATENTS
from pippin.backends.mlx.gpu.packed_attention import (
    MAINS,
    MOST_STATE,
    OUTPUTS,
    SHORTEST_STRETCH,
    all_mains,
    remembered_numbers,
    rotation,
    run_stretches,
)
from pippin.backends.mlx.gpu.packed_kernels import HEADER
from pippin.backends.mlx.layout import LayerCache

MOST_WARPS = 8  # SIMD groups of a block; not measured on Apple GPUs
TILE_BYTES = 18_432  # of the columns that a block has in threadgroup memory
MOST_COLUMNS = 16  # of these
AHEAD = 2  # columns whose scores are computed together
# A block has a few hundred threads of some hundred registers: a core has registers for two of them.
BLOCKS_PER_CORE = 3
INPUTS = (
    *("q", "p", "k", "r", "tail_k", "tail_v", *MAINS),
    *("places", "visible_tail", "cursor", "positions", "numbers"),
)


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
    q = call.q
    num_rows, num_heads, num_tokens, dim = q.shape
    assert num_tokens == 1, "drafts of rows of latents are not verified"
    rotated_dim = call.rotated.shape[-1]
    form = LatentForm.of(num_heads, (dim, rotated_dim), q.dtype.size)
    rope = None if call.ropes is None else call.ropes[1]
    positions = call.cursor if call.positions is None else call.positions
    return run_stretches(
        metal_kernel(
            *("pippin_attend_latents", INPUTS, OUTPUTS, ATTEND_LATENTS),
            header=HEADER,
            strided=True,
        ),
        call,
        inputs=[
            *(q, call.rotated, call.k, call.v, *call.tail, *all_mains(call)),
            *(call.places, call.visible_tail, call.cursor, positions),
            _numbers(call.scale, call.ropes),
        ],
        template=[
            *(("D", dim), ("R", rotated_dim), ("Heads", num_heads), ("Queries", form.queries)),
            *(("Tile", form.tile), ("Vec", form.vec), ("Ahead", AHEAD), *rotation(rope)),
        ],
        blocks=form.blocks,
        num_splits=num_stretches(num_rows * form.blocks, call.num_columns),
        threads=32 * form.warps,
    )
