"""Tokens times rows of an expert's packed weight, in tiles that go through shared memory."""

from __future__ import annotations

import triton
import triton.language as tl

from pippin.backends.torch.kernels.packed.numbers import factor, number


@triton.jit
def tile_sums(
    sums,  # [tokens, rows]
    x_rows,  # pointers [tokens, 1]
    is_token,  # [tokens]
    weight,  # PackedArrays
    row,  # int64 [rows]: of the weight
    is_row,
    start,
    end,  # words
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    PER_WORD: tl.constexpr,
    OFFSET: tl.constexpr,
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`sums` and x W^T over some words of the weight's rows, by tensor cores."""
    per_group: tl.constexpr = GROUP // PER_WORD
    for first in tl.range(start, end, WORDS, num_stages=STAGES):
        w = first + tl.arange(0, WORDS)
        inside = (w < end)[:, None] & is_row[None, :]
        words = tl.load(
            weight.words + row[None, :] * (K // PER_WORD) + w[:, None], mask=inside, other=0
        )
        at = row[None, :] * (K // GROUP) + (w // per_group)[:, None]
        scale = factor(weight.scales, at, inside)
        if OFFSET:
            offset = tl.load(weight.offsets + at, mask=inside, other=0.0).to(tl.float32)
        channel = (w // per_group) * GROUP + w % per_group
        for part in tl.static_range(PER_WORD):
            x_at = x_rows + (channel + part * per_group)[None, :]
            x = tl.load(x_at, mask=is_token[:, None] & (w < end)[None, :], other=0.0)
            found = number(words, part, KIND) * scale
            if OFFSET:
                found += offset
            sums = tl.dot(x, found.to(x.dtype), sums, input_precision=PRECISION)
    return sums
