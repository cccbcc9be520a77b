"""Two to four rows times a large packed weight, in registers. No norms, sums or gates around it.

As `products.py` beside it does one row, which see: numbers are multiplied as they lie in their
word, and what sums of four words are scaled by is read once for all rows. No tensor cores: these
want the numbers unpacked and in shared memory, which takes longer than to multiply with so few
rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.dependent import allow_next, dependent, wait_for_previous
from pippin.backends.torch.kernels.packed.numbers import (
    arrays_of,
    constants_of,
    factor,
    lifted,
    risen,
    sunk,
)
from pippin.backends.torch.kernels.packed.products import PackedRowTile
from pippin.backends.torch.models.packed import Packed


def fits_registers(num_rows: int, num_words: int) -> bool:
    """Whether that is faster than tensor cores, as measured on an H200."""
    return num_rows <= 2 or (num_rows <= 4 and num_words < 512)


def few_rows_tile_for(num_words: int) -> PackedRowTile:
    """A thread has four words of each row of the weight."""
    num_warps = triton.next_power_of_2(num_words) // 128
    return PackedRowTile(8 if num_words <= 512 else 4, max(1, min(16, num_warps)))


@triton.jit(do_not_specialize=["num_rows"])
def _in_registers(
    x,
    weight,
    bias,
    out,
    num_rows,
    num_out,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    PER_WORD: tl.constexpr,
    OFFSET: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,  # of a row, up to a power of two
    PDL: tl.constexpr,
):
    """Blocks are [rows of x, rows of the weight, words or fours of them]."""
    allow_next(PDL)
    per_group: tl.constexpr = GROUP // PER_WORD
    num_words: tl.constexpr = K // PER_WORD
    n, m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, ROWS)
    w, four = tl.arange(0, WORDS)[None, None, :], tl.arange(0, WORDS // 4)[None, None, :]
    in_n, is_row, in_w = (n < num_out)[None, :, None], (m < num_rows)[:, None, None], w < num_words
    row = n.to(tl.int64)[None, :, None]
    # All that does not depend on x is loaded before waiting for it.
    words = tl.load(weight.words + row * num_words + w, mask=in_n & in_w, other=0)
    of_group = row * (K // GROUP) + four // (per_group // 4)
    is_four = in_n & (four < num_words // 4)
    scale = factor(weight.scales, of_group, is_four)
    if OFFSET:
        offset = tl.load(weight.offsets + of_group, mask=is_four, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    total = tl.zeros([ROWS, 1, WORDS], tl.float32)
    found = tl.zeros([ROWS, BLOCK_N, WORDS], tl.float32)
    # Four at a time, as words are: so that a thread loads what it multiplies.
    channel = tl.max_contiguous((w // per_group) * GROUP + w % per_group, [1, 1, 4])
    of_x = x + m[:, None, None] * K + channel
    for part in tl.static_range(PER_WORD):
        value = tl.load(of_x + part * per_group, mask=is_row & in_w, other=0.0).to(tl.float32)
        total += value
        found += sunk(words, part, KIND) * lifted(value, part, KIND)
    fours = tl.sum(tl.reshape(found, [ROWS, BLOCK_N, WORDS // 4, 4]), axis=3)
    fours = risen(fours, KIND) * scale
    if OFFSET:
        fours += offset * tl.sum(tl.reshape(total, [ROWS, 1, WORDS // 4, 4]), axis=3)
    sums = tl.sum(fours, axis=2)
    if BIAS:
        sums += tl.load(bias + n, mask=n < num_out, other=0.0).to(tl.float32)[None, :]
    inside = (m < num_rows)[:, None] & (n < num_out)[None, :]
    at = m[:, None] * num_out + n[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


def few_rows_in_registers(
    x: torch.Tensor,  # [rows, K]
    weight: Packed,
    bias: torch.Tensor | None,
    tile: PackedRowTile | None = None,
) -> torch.Tensor:
    """[rows, N]"""
    (num_rows, size), num_out, num_words = x.shape, weight.shape[0], weight.words.shape[-1]
    tile = tile or few_rows_tile_for(num_words)
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    _in_registers[(triton.cdiv(num_out, tile.block_n),)](
        x.contiguous(),
        arrays_of(weight),
        bias,
        out,
        num_rows,
        num_out,
        K=size,
        **constants_of(weight),
        BIAS=bias is not None,
        ROWS=triton.next_power_of_2(num_rows),
        BLOCK_N=tile.block_n,
        WORDS=triton.next_power_of_2(num_words),
        num_warps=tile.num_warps,
        **dependent(x.device),
    )
    return out
