"""A row times a large weight, and what stands before and after it in a layer.

    y = epilogue(prologue(x) W^T)        x [1, K], W [N, K]

A decode step of one row costs what it costs to read the weights, once, with as few launches as
there can be. So the norm before a product is done while its weight streams past (what is divided
by is known at the end), and the residual sum, the gated product of a feed-forward layer, or the
convolution of a recurrent one, on the sums that are still in registers. A program reads whole rows
of the weight at once, before it waits for x.

2 to 8 rows, those of small batches and the drafts of one row, are multiplied in one of two ways:
two rows of x, or many channels, in registers, as one row is; up to 8 rows of few channels by tensor
cores, whose operands go through shared memory first. Which is faster was measured on an H200, and
so was for how large a model either of them beats cuBLAS, which multiplies more rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.dependent import allow_next, dependent, wait_for_previous
from pippin.backends.torch.kernels.epilogues import (
    RESIDUAL,
    SWIGLU,
    ConvStep,
    Epilogue,
    Tile,
    finish_sums,
    load_residual,
)
from pippin.backends.torch.kernels.packed.products import row_product
from pippin.backends.torch.models.packed import Packed
from pippin.backends.torch.models.parts import Linear, Norm

MOST_ROWS = 8
TENSOR_CORE_CHANNELS = 1024  # with so many channels at most, and more than two rows
_RESIDUAL, _SWIGLU = tl.constexpr(RESIDUAL), tl.constexpr(SWIGLU)


def most_rows(hidden: int) -> int:
    """That are better multiplied here than by cuBLAS, in a model with so many channels."""
    return MOST_ROWS if hidden <= 1024 else 2 if hidden <= 2048 else 1


def few_rows_tile_for(size: int, num_out: int, num_rows: int) -> Tile:
    """A thread multiplies 32 channels of a row of the weight, or 16: what its registers hold."""
    block_k = triton.next_power_of_2(size)
    if num_rows <= 2:
        return Tile(4 if num_out >= 3072 else 2, block_k, min(16, max(1, block_k >> 10)))
    return Tile(16 if size <= TENSOR_CORE_CHANNELS else 4, block_k, min(16, max(4, block_k >> 10)))


@triton.jit
def _load_residual(residual, m, n, num_rows, num_out, EPILOGUE: tl.constexpr):
    """What `_store` adds: it arrives while the sums are made."""
    found = (m + n) * 0.0
    if EPILOGUE == _RESIDUAL:
        inside = (m < num_rows) & (n < num_out)
        found = tl.load(residual + m * num_out + n, mask=inside, other=0.0).to(tl.float32)
    return found


@triton.jit
def _store(
    sums,
    sums2,  # with SWIGLU: of the rows of the weight behind the first num_out
    scale,  # with NORM
    added,  # with RESIDUAL
    bias,
    out,
    m,  # rows of x and n, rows of the weight: one across, one down
    n,
    num_rows,
    num_out,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr,
):
    if NORM:
        sums *= scale
        sums2 *= scale
    if BIAS:
        sums += tl.load(bias + n, mask=n < num_out, other=0.0).to(tl.float32)
        if EPILOGUE == _SWIGLU:
            sums2 += tl.load(bias + num_out + n, mask=n < num_out, other=0.0).to(tl.float32)
    if EPILOGUE == _RESIDUAL:
        sums += added
    if EPILOGUE == _SWIGLU:
        sums = sums * tl.sigmoid(sums) * sums2
    inside = (m < num_rows) & (n < num_out)
    tl.store(out + m * num_out + n, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _in_registers(
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
    BLOCK_K: tl.constexpr,  # K, up to a power of two
    PDL: tl.constexpr,
):
    """Blocks are [rows of x, rows of the weight, channels]: none moves between threads."""
    allow_next(PDL)
    n, m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK_K)[None, None, :]
    in_k = k < K
    of_w = w + n.to(tl.int64)[None, :, None] * K + k
    inside = (n < num_out)[None, :, None] & in_k
    w_block = tl.load(of_w, mask=inside, other=0.0)
    if EPILOGUE == _SWIGLU:
        w_block2 = tl.load(of_w + num_out * K, mask=inside, other=0.0)
    if NORM:
        weight = tl.load(norm + k, mask=in_k, other=0.0)
    wait_for_previous(PDL)
    added = _load_residual(residual, m[:, None], n[None, :], num_rows, num_out, EPILOGUE)
    is_row = (m < num_rows)[:, None, None]
    rows = tl.load(x + m[:, None, None] * K + k, mask=is_row & in_k, other=0.0).to(tl.float32)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(rows * rows, axis=2) / K + eps)
        rows *= weight
    sums = tl.sum(w_block.to(tl.float32) * rows, axis=2)
    sums2 = sums
    if EPILOGUE == _SWIGLU:
        sums2 = tl.sum(w_block2.to(tl.float32) * rows, axis=2)
    _store(
        sums,
        sums2,
        scale,
        added,
        bias,
        out,
        m[:, None],
        n[None, :],
        num_rows,
        num_out,
        NORM,
        BIAS,
        EPILOGUE,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _by_tensor_cores(
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
    PDL: tl.constexpr,
):
    """Blocks are [parts, rows of the weight, channels] and [parts, channels, rows of x]."""
    allow_next(PDL)
    n, m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    each: tl.constexpr = BLOCK_K // PARTS
    k = tl.arange(0, PARTS)[:, None] * each + tl.arange(0, each)[None, :]
    in_k = k < K
    of_w = w + n.to(tl.int64)[None, :, None] * K + k[:, None, :]
    inside = (n < num_out)[None, :, None] & in_k[:, None, :]
    w_block = tl.load(of_w, mask=inside, other=0.0)
    if EPILOGUE == _SWIGLU:
        w_block2 = tl.load(of_w + num_out * K, mask=inside, other=0.0)
    wait_for_previous(PDL)
    added = _load_residual(residual, m[None, :], n[:, None], num_rows, num_out, EPILOGUE)
    of_x = x + m[None, None, :] * K + k[:, :, None]
    rows = tl.load(of_x, mask=(m < num_rows)[None, None, :] & in_k[:, :, None], other=0.0)
    scale = 1.0
    if NORM:
        wide = rows.to(tl.float32)
        squares = tl.sum(tl.sum(wide * wide, axis=1), axis=0)
        scale = tl.rsqrt(squares / K + eps)[None, :]
        weight = tl.load(norm + k, mask=in_k, other=0.0)
        rows = (wide * weight[:, :, None]).to(rows.dtype)
    sums = tl.sum(tl.dot(w_block, rows), axis=0)
    sums2 = sums
    if EPILOGUE == _SWIGLU:
        sums2 = tl.sum(tl.dot(w_block2, rows), axis=0)
    _store(
        sums,
        sums2,
        scale,
        added,
        bias,
        out,
        m[None, :],
        n[:, None],
        num_rows,
        num_out,
        NORM,
        BIAS,
        EPILOGUE,
    )


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
    tile = tile or few_rows_tile_for(size, num_out, num_rows)
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    by_tensor_cores = num_rows > 2 and size <= TENSOR_CORE_CHANNELS
    kernel = _by_tensor_cores if by_tensor_cores else _in_registers
    kernel[(triton.cdiv(num_out, tile.block_n),)](
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
        ROWS=MOST_ROWS if by_tensor_cores else triton.next_power_of_2(num_rows),
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        **({"PARTS": min(tile.num_warps, tile.block_k // 16)} if by_tensor_cores else {}),
        **dependent(x.device),
    )
    return out


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
