"""Attention of a token of each row over packed latents (MLA): one or two kernels.

    a column:   [ latent: keys and values of all heads | rotated key ]

All heads of queries read the same columns. So a block of threads fetches a few columns at a time
for a SIMD group of each few heads, and no head is added up across SIMD groups. Blocks take a row's
stretches as packed_attention.py cuts them, and its second kernel adds these up.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from pippin.backends.mlx.attention.paths import PackedCall
from pippin.backends.mlx.gpu.latent_kernel import ATTEND_LATENTS
from pippin.backends.mlx.gpu.packed_attention import MOST_STATE, num_stretches, run_stretches
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


def attend_latents(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
    assert call.rotated is not None, "rows of latents have rotated keys"
    assert call.sinks is None, "latents have no sinks"
    num_rows, num_heads, num_tokens, dim = call.q.shape
    assert num_tokens == 1, "drafts of rows of latents are not verified"
    rotated_dim = call.rotated.shape[-1]
    form = LatentForm.of(num_heads, (dim, rotated_dim), call.q.dtype.size)
    return run_stretches(
        *("pippin_attend_latents", ATTEND_LATENTS, call),
        {"p": call.rotated, "r": call.v},
        {
            "D": dim,
            "R": rotated_dim,
            "Heads": num_heads,
            "Queries": form.queries,
            "Tile": form.tile,
            "Vec": form.vec,
            "Ahead": AHEAD,
        },
        blocks=form.blocks,
        num_splits=num_stretches(num_rows * form.blocks, call.num_columns, BLOCKS_PER_CORE),
        threads=32 * form.warps,
    )
