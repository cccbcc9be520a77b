"""A product of few rows with a large weight, and what stands before and after it in a layer.

    y = epilogue(prologue(x) W^T)        x [rows, K], W [N, K]

A decode step of few rows costs what it costs to read the weights, once, with as few launches as
there can be. So the norm before a product is done while its weight streams past (what is divided
by is known at the end, and is the same for a whole row), and the residual sum, the gated product
of a feed-forward layer, or the convolution of a recurrent one, on the sums that are still in
registers. One row is a sum of products; several are tensor-core tiles of 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

PLAIN, RESIDUAL, SWIGLU, CONV = range(4)  # epilogues
_RESIDUAL, _SWIGLU, _CONV = (tl.constexpr(i) for i in (RESIDUAL, SWIGLU, CONV))
MOST_ROWS = 16  # beyond, cuBLAS reads the weights as fast


@dataclass(frozen=True)
class Tile:
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def tile_for(num_rows: int, num_out: int) -> Tile:
    """Enough programs to fill a large GPU, and enough bytes on their way in each."""
    if num_rows == 1:
        return Tile(8 if num_out < 4096 else 16, 512, 4, 3)
    return Tile(64 if num_out > 65536 else 16, 256, 4, 4)


@triton.jit
def _product(
    x,
    w,
    bias,
    norm,
    residual,
    conv,
    taps,
    states_in,
    states_out,
    out,
    num_rows,
    num_out,
    K: tl.constexpr,
    eps,
    conv_stride,
    num_channels,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < num_out
    m = tl.arange(0, ROWS)
    in_m = m < num_rows
    squares = tl.zeros([ROWS], tl.float32)
    squares_of_one = tl.zeros([BLOCK_K], tl.float32)
    sums = tl.zeros([BLOCK_N, ROWS], tl.float32)
    sums2 = tl.zeros([BLOCK_N, ROWS], tl.float32)
    wide = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    wide2 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    rows_of_w = w + n.to(tl.int64)[:, None] * K
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        in_k = k < K
        w_block = tl.load(rows_of_w + k[None, :], mask=in_n[:, None] & in_k[None, :], other=0.0)
        if EPILOGUE == _SWIGLU:
            w_block2 = tl.load(
                rows_of_w + num_out * K + k[None, :],
                mask=in_n[:, None] & in_k[None, :],
                other=0.0,
            )
        if ROWS == 1:
            row = tl.load(x + k, mask=in_k, other=0.0).to(tl.float32)
            if NORM:
                squares_of_one += row * row
                row *= tl.load(norm + k, mask=in_k, other=0.0)
            wide += w_block.to(tl.float32) * row[None, :]
            if EPILOGUE == _SWIGLU:
                wide2 += w_block2.to(tl.float32) * row[None, :]
        else:
            x_block = tl.load(
                x + m[None, :] * K + k[:, None], mask=in_m[None, :] & in_k[:, None], other=0.0
            )
            if NORM:
                full = x_block.to(tl.float32)
                squares += tl.sum(full * full, axis=0)
                weight = tl.load(norm + k, mask=in_k, other=0.0)
                x_block = (full * weight[:, None]).to(x_block.dtype)
            sums = tl.dot(w_block, x_block, sums, input_precision=PRECISION)
            if EPILOGUE == _SWIGLU:
                sums2 = tl.dot(w_block2, x_block, sums2, input_precision=PRECISION)
    if ROWS == 1:
        sums = tl.sum(wide, axis=1)[:, None]
        sums2 = tl.sum(wide2, axis=1)[:, None]
    if NORM:
        if ROWS == 1:
            scale_of_one = tl.rsqrt(tl.sum(squares_of_one, axis=0) / K + eps)
            sums *= scale_of_one
            sums2 *= scale_of_one
        else:
            scale = tl.rsqrt(squares / K + eps)
            sums *= scale[None, :]
            sums2 *= scale[None, :]
    if BIAS:
        sums += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[:, None]
    inside = in_n[:, None] & in_m[None, :]
    at = m[None, :] * num_out + n[:, None]
    if EPILOGUE == _RESIDUAL:
        sums += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if EPILOGUE == _SWIGLU:
        sums = sums * tl.sigmoid(sums) * sums2
    if EPILOGUE == _CONV:
        sums = _convolve(
            sums, conv, taps, states_in, states_out, n, m, in_m, conv_stride, num_channels, TAPS
        )
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _convolve(
    sums,
    conv,
    taps,
    states_in,
    states_out,
    n,
    m,
    in_m,
    conv_stride,
    num_channels,
    TAPS: tl.constexpr,
):
    """Of channels: the causal convolution with the last inputs, its silu; the inputs move on.

    A channel of a row belongs to one program alone, which reads the old inputs and then writes the
    new ones: the two may lie in the same place.
    """
    is_channel = (n < num_channels)[:, None] & in_m[None, :]
    before = tl.load(states_in + m, mask=in_m, other=0).to(tl.int64) * conv_stride
    after = tl.load(states_out + m, mask=in_m, other=0).to(tl.int64) * conv_stride
    newest = sums.to(conv.dtype.element_ty)
    found = (
        newest.to(tl.float32)
        * tl.load(taps + (TAPS - 1) * num_channels + n, mask=n < num_channels, other=0.0).to(
            tl.float32
        )[:, None]
    )
    for tap in tl.static_range(TAPS - 1):
        at = tap * num_channels + n[:, None]
        value = tl.load(conv + before[None, :] + at, mask=is_channel, other=0.0)
        weight = tl.load(taps + tap * num_channels + n, mask=n < num_channels, other=0.0)
        found += value.to(tl.float32) * weight.to(tl.float32)[:, None]
        if tap > 0:
            tl.store(conv + after[None, :] + at - num_channels, value, mask=is_channel)
    last = (TAPS - 2) * num_channels + n[:, None]
    tl.store(conv + after[None, :] + last, newest, mask=is_channel)
    return tl.where((n < num_channels)[:, None], found * tl.sigmoid(found), sums)


def precision_of(dtype: torch.dtype) -> str:
    """float32 is served to be exact; other types have no more than tf32 keeps."""
    return "ieee" if dtype == torch.float32 else "tf32"


@dataclass(frozen=True)
class ConvStep:
    """Where the last inputs of a recurrent layer's channels lie."""

    conv: torch.Tensor  # [slabs, taps - 1, channels], a view of the pool
    taps: torch.Tensor  # [taps, channels]
    states_in: torch.Tensor  # int32 [rows]
    states_out: torch.Tensor


def product(
    x: torch.Tensor,  # [rows, K]
    weight: torch.Tensor,  # [N, K]; [2 N, K] with `swiglu`
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,  # float32 [K]
    eps: float = 0.0,
    residual: torch.Tensor | None = None,  # [rows, N]
    swiglu: bool = False,
    conv: ConvStep | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """[rows, N]"""
    num_rows, size = x.shape
    num_out = weight.shape[0] // (2 if swiglu else 1)
    tile = tile or tile_for(num_rows, num_out)
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    epilogue = RESIDUAL if residual is not None else SWIGLU if swiglu else CONV if conv else PLAIN
    _product[(triton.cdiv(num_out, tile.block_n),)](
        x,
        weight,
        bias,
        norm,
        residual,
        conv.conv if conv else None,
        conv.taps if conv else None,
        conv.states_in if conv else None,
        conv.states_out if conv else None,
        out,
        num_rows,
        num_out,
        size,
        eps,
        conv.conv.stride(0) if conv else 0,
        conv.conv.shape[2] if conv else 0,
        NORM=norm is not None,
        BIAS=bias is not None,
        EPILOGUE=epilogue,
        TAPS=conv.taps.shape[0] if conv else 0,
        ROWS=1 if num_rows == 1 else max(16, triton.next_power_of_2(num_rows)),
        BLOCK_N=max(tile.block_n, 1 if num_rows == 1 else 16),
        BLOCK_K=min(tile.block_k, triton.next_power_of_2(size)),
        PRECISION=precision_of(x.dtype),
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return out
