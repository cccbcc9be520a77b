"""A row times a large weight, and what stands before and after it in a layer.

    y = epilogue(prologue(x) W^T)        x [1, K], W [N, K]

A decode step of one row costs what it costs to read the weights, once, with as few launches as
there can be. So the norm before a product is done while its weight streams past (what is divided
by is known at the end), and the residual sum, the gated product of a feed-forward layer, or the
convolution of a recurrent one, on the sums that are still in registers. A program reads whole rows
of the weight at once, before it waits for x. A few rows are `few_rows.py`'s, more are cuBLAS's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.dependent import allow_next, dependent, wait_for_previous
from pippin.backends.torch.kernels.epilogues import (
    SWIGLU,
    ConvStep,
    Epilogue,
    Tile,
    finish_sums,
    load_residual,
)
from pippin.backends.torch.kernels.few_rows import few_rows_product
from pippin.backends.torch.kernels.packed.products import row_product
from pippin.backends.torch.models.packed import Packed
from pippin.backends.torch.models.parts import Linear, Norm

_SWIGLU = tl.constexpr(SWIGLU)


def tile_for(size: int, itemsize: int) -> Tile:
    """For so many channels: a warp reads 2 KB of each of four rows of the weight at once. The
    fastest of those tried on an H200, for models of 0.6B to 8B parameters."""
    block_k = triton.next_power_of_2(size)
    num_bytes = block_k * itemsize
    return Tile(max(1, min(4, (1 << 17) // num_bytes)), block_k, max(1, min(16, num_bytes >> 11)))


@triton.jit
def _product(
    x,
    w,
    bias,
    norm,
    residual,
    conv,
    out,
    num_out,
    K: tl.constexpr,
    eps,
    conv_stride,
    num_channels,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    TAPS: tl.constexpr,
    LINES: tl.constexpr,  # TAPS - 1, up to a power of two
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # K, up to a power of two
    PDL: tl.constexpr,
):
    allow_next(PDL)
    n, k = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    in_n, in_k = n < num_out, k < K
    inside = in_n[:, None] & in_k[None, :]
    rows_of_w = w + n.to(tl.int64)[:, None] * K
    # All that does not depend on x is loaded before waiting for it.
    w_block = tl.load(rows_of_w + k[None, :], mask=inside, other=0.0)
    if EPILOGUE == _SWIGLU:
        w_block2 = tl.load(rows_of_w + num_out * K + k[None, :], mask=inside, other=0.0)
    if NORM:
        weight = tl.load(norm + k, mask=in_k, other=0.0)
    wait_for_previous(PDL)
    added = load_residual(residual, n, num_out, EPILOGUE)
    row = tl.load(x + k, mask=in_k, other=0.0).to(tl.float32)
    mean_square = 0.0
    if NORM:
        mean_square = tl.sum(row * row, axis=0) / K
        row *= weight
    sums = tl.sum(w_block.to(tl.float32) * row[None, :], axis=1)
    sums2 = sums
    if EPILOGUE == _SWIGLU:
        sums2 = tl.sum(w_block2.to(tl.float32) * row[None, :], axis=1)
    finish_sums(
        sums,
        sums2,
        mean_square,
        bias,
        added,
        conv,
        out,
        n,
        num_out,
        eps,
        conv_stride,
        num_channels,
        NORM,
        BIAS,
        EPILOGUE,
        TAPS,
        LINES,
    )


def precision_of(dtype: torch.dtype) -> str:
    """float32 is served to be exact; other types have no more than tf32 keeps."""
    return "ieee" if dtype == torch.float32 else "tf32"


def product(
    x: torch.Tensor,  # [rows, K]: one, or a few where the weight is dense
    linear: Linear,  # weight [N, K]; [2 N, K] with `swiglu`
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,  # [rows, N]
    swiglu: bool = False,
    conv: ConvStep | None = None,  # of one row
    tile: Tile | None = None,
) -> torch.Tensor:
    """[rows, N]"""
    num_rows, size = x.shape
    weight, epilogue = linear.weight, Epilogue.of(residual, swiglu, conv)
    if isinstance(weight, Packed):
        return row_product(x, weight, linear.bias, norm, epilogue)
    assert isinstance(weight, torch.Tensor)
    if num_rows > 1:
        return few_rows_product(x, weight, linear.bias, norm, epilogue, tile)
    num_out = weight.shape[0] // (2 if swiglu else 1)
    tile = tile or tile_for(size, weight.element_size())
    out = torch.empty(1, num_out, dtype=x.dtype, device=x.device)
    _product[(triton.cdiv(num_out, tile.block_n),)](
        x,
        weight,
        linear.bias,
        norm.weight if norm else None,
        out=out,
        num_out=num_out,
        K=size,
        eps=norm.eps if norm else 0.0,
        **epilogue.arguments(),
        NORM=norm is not None,
        BIAS=linear.bias is not None,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        **dependent(x.device),
    )
    return out
