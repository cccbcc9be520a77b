"""top_p over a whole vocabulary without a sort: a threshold, digit by digit. Draws no tokens.

The rule is that of `sampling/rules.py`: masses are counted in whole units, whose sums are the
same in any order. Masses are at most 1, so the bits of a mass as a float are a number of 30 bits in
the same order. What is looked for is the largest such number that enough units lie above: for each
digit, the units above all 16 candidates are summed by blocks of the vocabulary, and one program
picks. No atomics, no data-dependent shapes; rows without top_p cost a few empty launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pippin.backends.sampling.rules import MASS_UNITS

BLOCK = 4096
_UNITS = tl.constexpr(MASS_UNITS)
_DIGITS = ((26, 4), (22, 4), (18, 4), (14, 4), (10, 4), (6, 4), (2, 4), (0, 2))  # shift, bits


@triton.jit
def _scaled(logits, inverse_temperature, vocab_size, BLOCK: tl.constexpr, SCALED: tl.constexpr):
    """Scaled logits of the program's block, and which of them there are."""
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    at = row.to(tl.int64) * vocab_size + token
    x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    if SCALED:
        x = x * tl.load(inverse_temperature + row)
    return x, inside


@triton.jit
def _masses(logits, inverse_temperature, tops, vocab_size, num_blocks, BLOCK, BLOCKS, SCALED):
    """The same, and their masses in between."""
    row = tl.program_id(0)
    x, inside = _scaled(logits, inverse_temperature, vocab_size, BLOCK, SCALED)
    b = tl.arange(0, BLOCKS)
    top = tl.load(tops + row * num_blocks + b, mask=b < num_blocks, other=float("-inf"))
    return x, tl.exp(x - tl.max(top, axis=0)), inside


@triton.jit
def _largest(
    logits,
    inverse_temperature,
    tops,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
):
    x, _ = _scaled(logits, inverse_temperature, vocab_size, BLOCK, SCALED)
    tl.store(tops + tl.program_id(0) * num_blocks + tl.program_id(1), tl.max(x, axis=0))


@triton.jit
def _sum_above(
    logits,
    inverse_temperature,
    tops,
    top_p,
    found,
    sums,
    vocab_size,
    num_blocks,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Units of a block above each candidate."""
    row, block = tl.program_id(0), tl.program_id(1)
    if tl.load(top_p + row) < 1.0:
        _, mass, inside = _masses(
            logits, inverse_temperature, tops, vocab_size, num_blocks, BLOCK, BLOCKS, SCALED
        )
        mass = tl.where(inside, mass, 0.0)
        key = mass.to(tl.int32, bitcast=True)
        units = (mass * _UNITS).to(tl.int64)
        least = 0
        if not FIRST:
            least = tl.load(found + row)
        at = sums + (row * num_blocks + block).to(tl.int64) * 16
        for digit in tl.static_range(1 << BITS):
            above = tl.where(key > least + (digit << SHIFT), units, 0)
            tl.store(at + digit, tl.sum(above, axis=0))


@triton.jit
def _pick(
    sums,
    top_p,
    found,
    needed,
    keeps_all,
    num_blocks,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The digit: of the last candidate that enough units are above."""
    row = tl.program_id(0)
    share = tl.load(top_p + row)
    if share < 1.0:
        b, digit = tl.arange(0, BLOCKS)[:, None], tl.arange(0, 1 << BITS)
        at = sums + (row * num_blocks + b).to(tl.int64) * 16 + digit[None, :]
        total = tl.sum(tl.load(at, mask=b < num_blocks, other=0), axis=0)
        before = 0
        if FIRST:
            # What is above 0 is all there is: less than a unit is none.
            all_units = tl.sum(tl.where(digit == 0, total, 0), axis=0)
            enough = tl.ceil(all_units.to(tl.float32) * share).to(tl.int64)
            enough = tl.maximum(enough, 1)
            tl.store(needed + row, enough)
            tl.store(keeps_all + row, (enough > all_units).to(tl.int32))
        else:
            enough = tl.load(needed + row)
            before = tl.load(found + row)
        is_enough = (digit > 0) & (total >= enough)
        tl.store(found + row, before + (tl.sum(is_enough.to(tl.int32), axis=0) << SHIFT))


@triton.jit
def _least_kept(
    logits,
    inverse_temperature,
    tops,
    top_p,
    min_p,
    found,
    keeps_all,
    leasts,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Of a block: the least scaled logit that is kept."""
    row, block = tl.program_id(0), tl.program_id(1)
    if tl.load(top_p + row) < 1.0:
        x, mass, inside = _masses(
            logits, inverse_temperature, tops, vocab_size, num_blocks, BLOCK, BLOCKS, SCALED
        )
        above = mass.to(tl.int32, bitcast=True) > tl.load(found + row)
        kept = (above | (tl.load(keeps_all + row) != 0)) & (mass >= tl.load(min_p + row))
        least = tl.min(tl.where(kept & inside, x, float("inf")), axis=0)
        tl.store(leasts + row * num_blocks + block, least)
    else:
        tl.store(leasts + row * num_blocks + block, float("-inf"))


def least_in_top_p(
    logits: torch.Tensor,  # [rows, vocab]
    top_p: torch.Tensor,  # float32 [rows]; 1 or more: off
    min_p: torch.Tensor,  # float32 [rows]
    inverse_temperature: torch.Tensor | None = None,  # float32 [rows]; None: logits are scaled
) -> torch.Tensor:
    """float32 [rows]: the least scaled logit that top_p and min_p keep; -inf where top_p is off."""
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    grid, device = (num_rows, num_blocks), logits.device
    tops = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device)
    sums = torch.empty(num_rows, num_blocks, 16, dtype=torch.int64, device=device)
    # Two tensors: a half of one would lie at places of other alignments, for other kernels.
    found, keeps_all = (torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(2))
    needed = torch.empty(num_rows, dtype=torch.int64, device=device)
    sizes = (vocab_size, num_blocks)
    blocks = {"BLOCK": BLOCK, "BLOCKS": triton.next_power_of_2(num_blocks)}
    scaled = {"SCALED": inverse_temperature is not None}
    read = (logits, inverse_temperature, tops)
    _largest[grid](*read, *sizes, BLOCK=BLOCK, **scaled, num_warps=8)
    for number, (shift, bits) in enumerate(_DIGITS):
        digit = {"SHIFT": shift, "BITS": bits, "FIRST": number == 0}
        _sum_above[grid](
            *read, top_p, found, sums, *sizes, **digit, **blocks, **scaled, num_warps=8
        )
        _pick[(num_rows,)](
            sums, top_p, found, needed, keeps_all, num_blocks, **digit, BLOCKS=blocks["BLOCKS"]
        )
    leasts = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=device)
    _least_kept[grid](
        *read, top_p, min_p, found, keeps_all, leasts, *sizes, **blocks, **scaled, num_warps=8
    )
    return leasts.amin(dim=1)
