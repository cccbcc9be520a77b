"""Rows times some rows of a packed weight, by tensor cores that take the weight from registers.

    sums[warp, row of the weight, row of x] = W x^T        over the words of each warp

The unpacked weight is the left operand. Where a thread has to have it is known, so that a thread
loads just those words, four of every eighth row, and unpacks them in place. Channels are therefore
in the order of words: of 16 words first their first parts, then their second. Each warp has words
of its own and all rows, so that a program reads x once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.dependent import dependent, wait_for_previous
from pippin.backends.torch.kernels.packed.numbers import (
    constants_of,
    factor,
    restored,
    two_at_a_time,
    weights_of,
)
from pippin.backends.torch.models.packed import Packed

MULTIPROCESSORS = 132  # of an H200
# Channels in a row that a thread has of what was joined: Triton 3.6 says four, 3.9 two.
_FOUR_CHANNELS = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7))


@dataclass(frozen=True)
class PackedTile:
    rows: int  # of x
    columns: int  # rows of the weight
    num_warps: int
    runs: int  # of 16 words, that a warp reads at a time

    def arguments(self, x: torch.Tensor, weight: Packed) -> dict[str, Any]:
        """Of a kernel that calls `packed_sums`, by name."""
        return {
            "K": weight.shape[-1],
            **constants_of(weight),
            "TWO_AT_A_TIME": two_at_a_time(x, weight),
            "COLUMNS": self.columns,
            "WARPS": self.num_warps,
            "RUNS": self.runs,
            "num_warps": self.num_warps,
            **dependent(x.device),
        }


def packed_tile_for(num_rows: int, num_out: int, num_words: int, itemsize: int) -> PackedTile:
    """The fastest of those tried on an H200, for models of 0.8B and 8B parameters."""
    rows, num_runs = triton.next_power_of_2(num_rows), triton.next_power_of_2(num_words) // 16
    num_runs = max(1, num_runs)
    if itemsize == 4:  # no tensor cores: whatever works
        return PackedTile(min(16, rows), 16, min(2, num_runs), 1)
    if rows <= 4 and (num_out <= 2048 or num_runs <= 8):  # all words at once, or nearly
        columns = 16 if num_out <= 2048 else 32
        if rows == 1 and num_runs <= 8:
            return PackedTile(rows, columns, num_runs, 1)
        return PackedTile(rows, columns, max(1, min(16, num_runs // 2)), 2)
    if num_out >= 64 * MULTIPROCESSORS:
        return PackedTile(rows, 32 if rows == 1 else 64, min(4, num_runs), 1)
    if num_out <= 2048:
        return PackedTile(rows, 32, min(4, num_runs), 1)
    columns = 16 if rows == 1 else 32 if rows == 32 else 64
    return PackedTile(rows, columns, min(8, num_runs), 1)


@triton.jit
def _of_words(each):
    """What every four words have, of each of them: [4 * n] to [n, 16]."""
    num_rows: tl.constexpr = each.shape[0] // 4
    found = tl.reshape(each, [num_rows, 4])[:, :, None]
    return tl.reshape(tl.broadcast_to(found, [num_rows, 4, 4]), [num_rows, 16])


@triton.jit
def _places(
    i,
    first_row,
    last_row,
    apart,
    COLUMNS: tl.constexpr,
    SPAN: tl.constexpr,
    WARPS: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Of runs of 16 words, in the order in which Triton gives them to lanes and then to warps: the
    row of the weight, and which run of it."""
    column = i // (8 * WARPS) % (COLUMNS // 8) * 8 + i % 8
    row = tl.minimum(first_row + column % SPAN, last_row) + column // SPAN * apart
    return row, i // 8 % WARPS * RUNS + i // (COLUMNS * WARPS)


@triton.jit
def _load(
    weight,
    words_at,  # [n, 16]
    group_at,  # [4 * n]: of every four words
    four,  # [4 * n]: which one of its row it is
    first,  # four that is read
    is_step,
    num_fours: tl.constexpr,
    per_group: tl.constexpr,
    OFFSET: tl.constexpr,
    TWO_AT_A_TIME: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Words, and a scale and an offset for every four. Words are read once: x is to stay in L1."""
    words_at += first * 4
    group_at += first * 4 // per_group
    if RAGGED:
        inside = is_step & (four + first < num_fours)
        mask = _of_words(inside)
        words = tl.load(weight.words + words_at, mask=mask, other=0, cache_modifier=".cg")
    else:
        inside = is_step
        words = tl.load(weight.words + words_at, mask=inside, cache_modifier=".cg")
    if TWO_AT_A_TIME:
        scale = tl.load(weight.scales + group_at, mask=inside, other=0.0)
    else:
        scale = factor(weight.scales, group_at, inside)
    offset = tl.zeros_like(scale)
    if OFFSET:
        offset = tl.load(weight.offsets + group_at, mask=inside, other=0.0)
    return words, scale, offset


@triton.jit
def _load_x(
    x_rows,
    norm,
    squares,
    channel,
    word,
    first,
    is_step,
    num_fours: tl.constexpr,
    PER_WORD: tl.constexpr,
    NORM: tl.constexpr,
    LESS: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """What the words from a four on are multiplied with, and the sums of squares with it."""
    inside = is_step & (word + first * 4 < num_fours * 4) if RAGGED else is_step
    at = first * 4 * PER_WORD + channel
    x = tl.load(x_rows + at, mask=inside, other=0.0)
    if NORM:
        wide = x.to(tl.float32)
        squares += wide * wide
        # Not divided yet, it may be too large for a float16.
        x = (wide * tl.load(norm + at, mask=inside, other=0.0) * LESS).to(x.dtype)
    return x, squares


@triton.jit
def packed_sums(
    x_rows,  # pointers [1, ROWS, 1], all of them to rows that are there
    norm,
    weight,  # PackedArrays
    first_row,  # int64: of the weight
    last_row,
    apart,  # rows between each SPAN of rows and the next
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    PER_WORD: tl.constexpr,
    OFFSET: tl.constexpr,
    TWO_AT_A_TIME: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # rows of the weight
    SPAN: tl.constexpr,
    NORM: tl.constexpr,
    WARPS: tl.constexpr,
    RUNS: tl.constexpr,  # of 16 words, that a warp reads at a time
    PDL: tl.constexpr,
):
    """float32 [COLUMNS, ROWS], and the sums of squares of x, [ROWS], with NORM."""
    ahead: tl.constexpr = ROWS <= 2  # of x: so few have room in registers
    precision: tl.constexpr = "ieee" if x_rows.dtype.element_ty == tl.float32 else "tf32"
    less: tl.constexpr = 0.015625 if NORM and x_rows.dtype.element_ty == tl.float16 else 1.0
    per_group: tl.constexpr = GROUP // PER_WORD
    num_fours: tl.constexpr = K // PER_WORD // 4
    step: tl.constexpr = WARPS * RUNS * 4
    num_steps: tl.constexpr = (num_fours + step - 1) // step
    ragged: tl.constexpr = num_fours % step != 0
    channels: tl.constexpr = RUNS * 16 * PER_WORD
    num_runs: tl.constexpr = COLUMNS * WARPS * RUNS
    row, run = _places(
        tl.arange(0, num_runs), first_row, last_row, apart, COLUMNS, SPAN, WARPS, RUNS
    )
    words_at = (row * num_fours * 4 + run * 16)[:, None] + tl.arange(0, 16)[None, :]
    i = tl.arange(0, num_runs * 4)
    row, run = _places(i // 4, first_row, last_row, apart, COLUMNS, SPAN, WARPS, RUNS)
    four = run * 4 + i % 4
    group_at = tl.max_contiguous(row * (K // GROUP) + four * 4 // per_group, [1])
    # Of x: [WARPS, ROWS, channels]
    i = tl.arange(0, channels)[None, None, :]
    run_of_x = tl.arange(0, WARPS)[:, None, None] * RUNS + i // (16 * PER_WORD)
    w, part = run_of_x * 16 + i % 16, i // 16 % PER_WORD
    channel = w // per_group * GROUP + part * per_group + w % per_group
    contiguous: tl.constexpr = min(per_group, 16)
    channel = tl.max_contiguous(tl.multiple_of(channel, [1, 1, contiguous]), [1, 1, contiguous])
    # Programs start at different places, so that not all of them ask for one line of x at a time.
    start = (tl.program_id(0) + tl.program_id(1)) % num_steps
    words, scale, offset = _load(
        weight,
        words_at,
        group_at,
        four,
        start * step,
        True,
        num_fours,
        per_group,
        OFFSET,
        TWO_AT_A_TIME,
        ragged,
    )
    wait_for_previous(PDL)
    sums = tl.zeros([WARPS, COLUMNS, ROWS], tl.float32)
    squares = tl.zeros([WARPS, ROWS, channels], tl.float32)
    if ahead:
        x, squares = _load_x(
            x_rows,
            norm,
            squares,
            channel,
            w,
            start * step,
            True,
            num_fours,
            PER_WORD,
            NORM,
            less,
            ragged,
        )
    for i in tl.range(0, num_steps, num_stages=1):
        is_more, following = i + 1 < num_steps, (start + i + 1) % num_steps * step
        if not ahead:
            x, squares = _load_x(
                x_rows,
                norm,
                squares,
                channel,
                w,
                (start + i) % num_steps * step,
                True,
                num_fours,
                PER_WORD,
                NORM,
                less,
                ragged,
            )
        next_words, next_scale, next_offset = _load(
            weight,
            words_at,
            group_at,
            four,
            following,
            is_more,
            num_fours,
            per_group,
            OFFSET,
            TWO_AT_A_TIME,
            ragged,
        )
        if ahead:
            next_x, squares = _load_x(
                x_rows,
                norm,
                squares,
                channel,
                w,
                following,
                is_more,
                num_fours,
                PER_WORD,
                NORM,
                less,
                ragged,
            )
        scale, offset = _of_words(scale), _of_words(offset)
        found = weights_of(words, scale, offset, KIND, PER_WORD, x.dtype, TWO_AT_A_TIME)
        # A thread's words are t, a and b, of 4, 2 and 2; its parts are h and l, of many and 2.
        found = tl.reshape(found, [RUNS, COLUMNS // 8, WARPS, 8, 4, 2, 2, PER_WORD // 2, 2])
        right = tl.reshape(x, [WARPS, ROWS, RUNS * PER_WORD // 2, 2, 4, 2, 2])
        if _FOUR_CHANNELS:  # h a t l b
            found = tl.permute(found, [2, 1, 3, 0, 7, 5, 4, 8, 6])
            right = tl.permute(right, [0, 2, 5, 4, 3, 6, 1])
        else:  # h l a t b
            found = tl.permute(found, [2, 1, 3, 0, 7, 8, 5, 4, 6])
            right = tl.permute(right, [0, 2, 3, 5, 4, 6, 1])
        found = tl.reshape(found, [WARPS, COLUMNS, channels])
        right = tl.reshape(right, [WARPS, channels, ROWS])
        sums = tl.dot(found, right, sums, input_precision=precision)
        words, scale, offset = next_words, next_scale, next_offset
        if ahead:
            x = next_x
    sums = restored(tl.sum(sums, axis=0), x_rows.dtype.element_ty, TWO_AT_A_TIME)
    return sums / less, tl.sum(tl.sum(squares, axis=2), axis=0)
