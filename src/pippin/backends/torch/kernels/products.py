"""A row times a large weight, and what stands before and after it in a layer.

    y = epilogue(prologue(x) W^T)        x [1, K], W [N, K]

A decode step of one row costs what it costs to read the weights, once, with as few launches as
there can be. So the norm before a product is done while its weight streams past (what is divided
by is known at the end), and the residual sum, the gated product of a feed-forward layer, or the
convolution of a recurrent one, on the sums that are still in registers. Two rows are cuBLAS's: it
takes 1.25 ms for a step of eight where tiles of ours took 1.71 (docs/performance/history-gpu.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.epilogues import SWIGLU, ConvStep, Epilogue, finish_sums
from pippin.backends.torch.kernels.packed.products import row_product
from pippin.backends.torch.models.packed import Packed
from pippin.backends.torch.models.parts import Linear, Norm

_SWIGLU = tl.constexpr(SWIGLU)


@dataclass(frozen=True)
class Tile:
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tile_for(num_out: int) -> Tile:
    """The fastest of those tried on an H200, for the products of a model of 0.8B parameters."""
    if num_out <= 2048:
        return Tile(4, 512, 4, 5)
    return Tile(8, 512 if num_out > 65536 else 256, 4, 3)


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
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < num_out
    squares = tl.zeros([BLOCK_K], tl.float32)
    wide = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    wide2 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    rows_of_w = w + n.to(tl.int64)[:, None] * K
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        in_k = k < K
        inside = in_n[:, None] & in_k[None, :]
        w_block = tl.load(rows_of_w + k[None, :], mask=inside, other=0.0)
        if EPILOGUE == _SWIGLU:
            w_block2 = tl.load(rows_of_w + num_out * K + k[None, :], mask=inside, other=0.0)
        row = tl.load(x + k, mask=in_k, other=0.0).to(tl.float32)
        if NORM:
            squares += row * row
            row *= tl.load(norm + k, mask=in_k, other=0.0)
        wide += w_block.to(tl.float32) * row[None, :]
        if EPILOGUE == _SWIGLU:
            wide2 += w_block2.to(tl.float32) * row[None, :]
    finish_sums(
        tl.sum(wide, axis=1),
        tl.sum(wide2, axis=1),
        tl.sum(squares, axis=0) / K,
        bias,
        residual,
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
    x: torch.Tensor,  # [1, K]
    linear: Linear,  # weight [N, K]; [2 N, K] with `swiglu`
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,  # [1, N]
    swiglu: bool = False,
    conv: ConvStep | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """[1, N]"""
    num_rows, size = x.shape
    assert num_rows == 1
    weight, epilogue = linear.weight, Epilogue.of(residual, swiglu, conv)
    if isinstance(weight, Packed):
        return row_product(x, weight, linear.bias, norm, epilogue)
    assert isinstance(weight, torch.Tensor)
    num_out = weight.shape[0] // (2 if swiglu else 1)
    tile = tile or tile_for(num_out)
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
        BLOCK_K=min(tile.block_k, triton.next_power_of_2(size)),
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return out
