"""A row times a large packed weight, and what stands before and after it in a layer.

As `kernels/products.py`, which see, and with its epilogues. What is read is a quarter or half of a
dense weight, so everything else counts as well. A thread has several rows of the weight, which
share what it reads of x. Integers are multiplied as they lie in their word, and four words, always
of one group, by their scale together:

    sum of weight * x = scale * (sum of number * x) + offset * (sum of x)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.dependent import allow_next, dependent, wait_for_previous
from pippin.backends.torch.kernels.epilogues import SWIGLU, Epilogue, finish_sums, load_residual
from pippin.backends.torch.kernels.packed.numbers import (
    arrays_of,
    constants_of,
    factor,
    lifted,
    risen,
    sunk,
)
from pippin.backends.torch.models.packed import Packed
from pippin.backends.torch.models.parts import Norm

_SWIGLU = tl.constexpr(SWIGLU)


@dataclass(frozen=True)
class PackedRowTile:
    block_n: int
    num_warps: int


def packed_row_tile_for(num_out: int, num_words: int) -> PackedRowTile:
    """A thread has four words of each row."""
    num_warps = triton.next_power_of_2(num_words) // 128
    return PackedRowTile(4 if num_out <= 2048 else 8, max(1, min(16, num_warps)))


@triton.jit
def _scales(weight, row, group, mask, K: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr):
    """Of every four words: what they are multiplied by, and what is added."""
    at = row * (K // GROUP) + group
    scale = factor(weight.scales, at, mask)
    offset = scale
    if OFFSET:
        offset = tl.load(weight.offsets + at, mask=mask, other=0.0).to(tl.float32)
    return scale, offset


@triton.jit
def _scaled_sum(found, total, scale, offset, KIND: tl.constexpr, OFFSET: tl.constexpr):
    """[rows], of sums of four words each."""
    found = risen(found, KIND) * scale
    if OFFSET:
        found += offset * total
    return tl.sum(found, axis=1)


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
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    TAPS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,  # of a row, up to a power of two
    PDL: tl.constexpr,
):
    allow_next(PDL)
    per_group: tl.constexpr = GROUP // PER_WORD
    num_words: tl.constexpr = K // PER_WORD
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w, four = tl.arange(0, WORDS), tl.arange(0, WORDS // 4)
    in_n, in_w = n < num_out, w < num_words
    inside = in_n[:, None] & in_w[None, :]
    is_four = in_n[:, None] & (four < num_words // 4)[None, :]
    group = (four // (per_group // 4))[None, :]
    row = n.to(tl.int64)[:, None]
    # All that does not depend on x is loaded before waiting for it.
    words = tl.load(weight.words + row * num_words + w[None, :], mask=inside, other=0)
    scale, offset = _scales(weight, row, group, is_four, K, GROUP, OFFSET)
    if EPILOGUE == _SWIGLU:
        row2 = row + num_out
        words2 = tl.load(weight.words + row2 * num_words + w[None, :], mask=inside, other=0)
        scale2, offset2 = _scales(weight, row2, group, is_four, K, GROUP, OFFSET)
        found2 = tl.zeros([BLOCK_N, WORDS], tl.float32)
    wait_for_previous(PDL)
    added = load_residual(residual, n, num_out, EPILOGUE)
    squares = tl.zeros([WORDS], tl.float32)
    total = tl.zeros([WORDS], tl.float32)
    found = tl.zeros([BLOCK_N, WORDS], tl.float32)
    channel = (w // per_group) * GROUP + w % per_group
    for part in tl.static_range(PER_WORD):
        at = channel + part * per_group
        value = tl.load(x + at, mask=in_w, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value *= tl.load(norm + at, mask=in_w, other=0.0)
        total += value
        value = lifted(value, part, KIND)
        found += sunk(words, part, KIND) * value[None, :]
        if EPILOGUE == _SWIGLU:
            found2 += sunk(words2, part, KIND) * value[None, :]
    total4 = tl.sum(tl.reshape(total, [WORDS // 4, 4]), axis=1)[None, :]
    found4 = tl.sum(tl.reshape(found, [BLOCK_N, WORDS // 4, 4]), axis=2)
    sums = _scaled_sum(found4, total4, scale, offset, KIND, OFFSET)
    sums2 = sums
    if EPILOGUE == _SWIGLU:
        found4 = tl.sum(tl.reshape(found2, [BLOCK_N, WORDS // 4, 4]), axis=2)
        sums2 = _scaled_sum(found4, total4, scale2, offset2, KIND, OFFSET)
    finish_sums(
        sums,
        sums2,
        tl.sum(squares, axis=0) / K,
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


def row_product(
    x: torch.Tensor,  # [1, K]
    weight: Packed,  # [N, K]; [2 N, K] with swiglu
    bias: torch.Tensor | None,
    norm: Norm | None,
    epilogue: Epilogue,
    tile: PackedRowTile | None = None,
) -> torch.Tensor:
    """[1, N]"""
    assert len(x) == 1
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
        **epilogue.arguments(),
        NORM=norm is not None,
        BIAS=bias is not None,
        BLOCK_N=tile.block_n,
        WORDS=triton.next_power_of_2(weight.words.shape[-1]),
        num_warps=tile.num_warps,
        **dependent(x.device),
    )
    return out
