"""A row times a large packed weight, and what stands before and after it in a layer.

As `kernels/products.py`, which see, and with its epilogues. What is read is a quarter or half of a
dense weight, so everything else counts as well. A thread has several rows of the weight, which
share what it reads of x. Numbers stay raised by a constant, which costs nothing to make of bits,
and four words, always of one group, are multiplied by their scale together:

    sum of weight * x = scale * (sum of raised * x) + (offset - constant * scale) * (sum of x)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.epilogues import SWIGLU, Epilogue, finish_sums
from pippin.backends.torch.kernels.packed.numbers import (
    RAISED,
    arrays_of,
    constants_of,
    factor,
    raised,
)
from pippin.backends.torch.models.packed import Packed
from pippin.backends.torch.models.parts import Norm

_SWIGLU = tl.constexpr(SWIGLU)


@dataclass(frozen=True)
class PackedRowTile:
    block_n: int
    words: int
    num_warps: int
    num_stages: int


def packed_row_tile_for(num_out: int, num_words: int) -> PackedRowTile:
    """A warp reads 128 words of a row at a time; 1, 2 or 4 of them share a row."""
    num_warps = 1 << (max(1, min(4, num_words // 128)).bit_length() - 1)
    block_n = 4 if num_out <= 2048 else 8
    return PackedRowTile(block_n, 128 * num_warps, num_warps, 3)


@triton.jit
def _scaled(found, total, weight, at, mask, OFFSET: tl.constexpr, PLUS: tl.constexpr):
    scale = factor(weight.scales, at, mask)
    if OFFSET:
        offset = tl.load(weight.offsets + at, mask=mask, other=0.0).to(tl.float32)
        found = found * scale + (offset - PLUS * scale) * total
    elif PLUS != 0:
        found = (found - PLUS * total) * scale
    else:
        found *= scale
    return found


@triton.jit
def _row_product(
    x,
    weight,
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
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    PER_WORD: tl.constexpr,
    OFFSET: tl.constexpr,
    PLUS: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    TAPS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    per_group: tl.constexpr = GROUP // PER_WORD
    num_words: tl.constexpr = K // PER_WORD
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < num_out
    squares = tl.zeros([WORDS], tl.float32)
    wide = tl.zeros([BLOCK_N, WORDS // 4], tl.float32)
    wide2 = tl.zeros([BLOCK_N, WORDS // 4], tl.float32)
    row = n.to(tl.int64)[:, None]
    row2 = row + num_out
    for start in tl.range(0, num_words, WORDS, num_stages=STAGES):
        w = start + tl.arange(0, WORDS)
        in_w = w < num_words
        inside = in_n[:, None] & in_w[None, :]
        words = tl.load(weight.words + row * num_words + w[None, :], mask=inside, other=0)
        found = tl.zeros([BLOCK_N, WORDS], tl.float32)
        if EPILOGUE == _SWIGLU:
            words2 = tl.load(weight.words + row2 * num_words + w[None, :], mask=inside, other=0)
            found2 = tl.zeros([BLOCK_N, WORDS], tl.float32)
        total = tl.zeros([WORDS], tl.float32)
        channel = (w // per_group) * GROUP + w % per_group
        for part in tl.static_range(PER_WORD):
            at = channel + part * per_group
            value = tl.load(x + at, mask=in_w, other=0.0).to(tl.float32)
            if NORM:
                squares += value * value
                value *= tl.load(norm + at, mask=in_w, other=0.0)
            total += value
            found += raised(words, part, KIND) * value[None, :]
            if EPILOGUE == _SWIGLU:
                found2 += raised(words2, part, KIND) * value[None, :]
        four = start // 4 + tl.arange(0, WORDS // 4)
        is_four = in_n[:, None] & (four < num_words // 4)[None, :]
        group = (four // (per_group // 4))[None, :]
        total4 = tl.sum(tl.reshape(total, [WORDS // 4, 4]), axis=1)[None, :]
        found4 = tl.sum(tl.reshape(found, [BLOCK_N, WORDS // 4, 4]), axis=2)
        at_group = row * (K // GROUP) + group
        wide += _scaled(found4, total4, weight, at_group, is_four, OFFSET, PLUS)
        if EPILOGUE == _SWIGLU:
            found4 = tl.sum(tl.reshape(found2, [BLOCK_N, WORDS // 4, 4]), axis=2)
            at_group = row2 * (K // GROUP) + group
            wide2 += _scaled(found4, total4, weight, at_group, is_four, OFFSET, PLUS)
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


def row_product(
    x: torch.Tensor,  # [1, K]
    weight: Packed,  # [N, K]; [2 N, K] with swiglu
    bias: torch.Tensor | None,
    norm: Norm | None,
    epilogue: Epilogue,
    tile: PackedRowTile | None = None,
) -> torch.Tensor:
    """[1, N]"""
    num_out = weight.shape[0] // (2 if epilogue.kind == SWIGLU else 1)
    tile = tile or packed_row_tile_for(num_out, weight.words.shape[-1])
    out = torch.empty(1, num_out, dtype=x.dtype, device=x.device)
    _row_product[(triton.cdiv(num_out, tile.block_n),)](
        x,
        arrays_of(weight),
        bias,
        norm.weight if norm else None,
        out=out,
        num_out=num_out,
        K=weight.shape[1],
        eps=norm.eps if norm else 0.0,
        **constants_of(weight),
        PLUS=RAISED[weight.numbers],
        **epilogue.arguments(),
        NORM=norm is not None,
        BIAS=bias is not None,
        BLOCK_N=tile.block_n,
        WORDS=tile.words,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return out
