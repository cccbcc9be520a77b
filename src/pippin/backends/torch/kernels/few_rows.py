"""A few rows times a large weight, by tensor cores, and what stands around it in a layer.

As `products.py`, which see, for 2 to 8 rows: those of small batches, and the drafts of one row.
Each warp multiplies its share of the channels, and their sums are added up. On an H200 a step of 4
rows takes 0.85 and 0.72 of what it takes with cuBLAS for models with 1,024 channels, whose products
are short, and 1.2 times as long for one with 2,048: these are left to cuBLAS.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.dependent import (
    allow_next,
    dependent,
    prefetch,
    wait_for_previous,
)
from pippin.backends.torch.kernels.epilogues import RESIDUAL, SWIGLU, Epilogue, Tile
from pippin.backends.torch.models.parts import Norm

MOST_ROWS = 8
MOST_HIDDEN = 1024  # channels of a model
_RESIDUAL, _SWIGLU = tl.constexpr(RESIDUAL), tl.constexpr(SWIGLU)


def few_rows_tile_for(size: int) -> Tile:
    return Tile(16, min(1024, triton.next_power_of_2(size)), 4)


@triton.jit
def _add(sums, w_block, rows):
    """weight [parts, n, channels], rows [parts, channels, rows]; sums [n, rows]"""
    return sums + tl.sum(tl.dot(w_block, rows), axis=0)


@triton.jit
def _normed_rows(rows, norm, k, in_k, squares, NORM: tl.constexpr):
    """But for the division: what it is by adds up in `squares`, [parts, rows]."""
    if NORM:
        wide = rows.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
        weight = tl.load(norm + k, mask=in_k, other=0.0)
        rows = (wide * weight[:, :, None]).to(rows.dtype)
    return rows, squares


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x,
    w,
    bias,
    norm,
    residual,
    out,
    num_rows,
    num_out,
    K: tl.constexpr,
    eps,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,  # of BLOCK_K, one for each warp
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    n, m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    in_n, is_row = n < num_out, m < num_rows
    each: tl.constexpr = BLOCK_K // PARTS
    k = tl.arange(0, PARTS)[:, None] * each + tl.arange(0, each)[None, :]
    in_k = k < K
    of_w = w + n.to(tl.int64)[None, :, None] * K + k[:, None, :]
    of_x = x + m[None, None, :] * K + k[:, :, None]
    # The first channels do not wait for x, and the others are on their way.
    inside = in_k[:, None, :] & in_n[None, :, None]
    w_block = tl.load(of_w, mask=inside, other=0.0)
    if EPILOGUE == _SWIGLU:
        w_block2 = tl.load(of_w + num_out * K, mask=inside, other=0.0)
    if K > BLOCK_K:
        first = tl.program_id(0).to(tl.int64) * (BLOCK_N * K)
        end = tl.cast(num_out, tl.int64) * K
        prefetch(w, first, BLOCK_N * K, end, PDL)
        if EPILOGUE == _SWIGLU:
            prefetch(w, first + end, BLOCK_N * K, 2 * end, PDL)
    wait_for_previous(PDL)
    squares = tl.zeros([PARTS, ROWS], tl.float32)
    sums = tl.zeros([BLOCK_N, ROWS], tl.float32)
    sums2 = tl.zeros([BLOCK_N, ROWS], tl.float32)
    rows = tl.load(of_x, mask=in_k[:, :, None] & is_row[None, None, :], other=0.0)
    rows, squares = _normed_rows(rows, norm, k, in_k, squares, NORM)
    sums = _add(sums, w_block, rows)
    if EPILOGUE == _SWIGLU:
        sums2 = _add(sums2, w_block2, rows)
    for start in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        in_k = start + k < K
        inside = in_k[:, None, :] & in_n[None, :, None]
        w_block = tl.load(of_w + start, mask=inside, other=0.0)
        rows = tl.load(of_x + start, mask=in_k[:, :, None] & is_row[None, None, :], other=0.0)
        rows, squares = _normed_rows(rows, norm, start + k, in_k, squares, NORM)
        sums = _add(sums, w_block, rows)
        if EPILOGUE == _SWIGLU:
            w_block2 = tl.load(of_w + num_out * K + start, mask=inside, other=0.0)
            sums2 = _add(sums2, w_block2, rows)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)[None, :]
        sums *= scale
        sums2 *= scale
    if BIAS:
        sums += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
        if EPILOGUE == _SWIGLU:
            sums2 += tl.load(bias + num_out + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    at = m[None, :] * num_out + n[:, None]
    is_result = is_row[None, :] & in_n[:, None]
    if EPILOGUE == _RESIDUAL:
        sums += tl.load(residual + at, mask=is_result, other=0.0).to(tl.float32)
    if EPILOGUE == _SWIGLU:
        sums = sums * tl.sigmoid(sums) * sums2
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=is_result)


def few_rows_product(
    x: torch.Tensor,  # [rows, K]
    weight: torch.Tensor,  # [N, K]; [2 N, K] with swiglu
    bias: torch.Tensor | None,
    norm: Norm | None,
    epilogue: Epilogue,
    tile: Tile | None = None,
) -> torch.Tensor:
    """[rows, N], of 16 bits: what float32 needs of registers is too much."""
    num_rows, size = x.shape
    assert 1 < num_rows <= MOST_ROWS
    assert weight.element_size() == 2
    assert epilogue.conv is None
    num_out = weight.shape[0] // (2 if epilogue.kind == SWIGLU else 1)
    tile = tile or few_rows_tile_for(size)
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    _few_rows[(triton.cdiv(num_out, tile.block_n),)](
        x,
        weight,
        bias,
        norm.weight if norm else None,
        epilogue.residual,
        out,
        num_rows,
        num_out,
        K=size,
        eps=norm.eps if norm else 0.0,
        NORM=norm is not None,
        BIAS=bias is not None,
        EPILOGUE=epilogue.kind,
        ROWS=MOST_ROWS,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        PARTS=min(tile.num_warps, tile.block_k // 16),
        STAGES=2,
        num_warps=tile.num_warps,
        **dependent(x.device),
    )
    return out
