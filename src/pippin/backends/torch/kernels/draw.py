"""Rows of logits to tokens, in two kernels: temperature, thresholds, noise, the largest; then the
largest of all blocks, which goes into the future map.

The noise is that of `backends/sampling/noise.py`, to the bit. A row that is greedy has no noise;
one without filters a threshold of -inf. Of equal sums the first token is taken.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pippin.backends.sampling.noise import THREEFRY_PARITY, THREEFRY_ROTATIONS
from pippin.backends.sampling.rules import FAR
from pippin.backends.torch.kernels.dependent import allow_next, dependent, wait_for_previous
from pippin.backends.torch.kernels.top_p import least_in_top_p
from pippin.backends.torch.step.decode_inputs import Choice, Inputs
from pippin.backends.torch.step.filters import is_top_p_alone, least_kept

BLOCK = 2048
_R0, _R1, _R2, _R3 = (tl.constexpr(r) for r in THREEFRY_ROTATIONS[0])
_R4, _R5, _R6, _R7 = (tl.constexpr(r) for r in THREEFRY_ROTATIONS[1])
_PARITY = tl.constexpr(THREEFRY_PARITY)
_FAR = tl.constexpr(FAR)


class Noise(NamedTuple):
    inverse_temperature: torch.Tensor  # float32 [rows]
    thresholds: torch.Tensor  # float32 [rows]: the least scaled logit that is kept
    noisy: torch.Tensor  # int32 [rows]: 0 where greedy
    keys: torch.Tensor  # int32 [rows, 2]


@triton.jit
def _round(x0, x1, ROTATION: tl.constexpr):
    x0 = x0 + x1
    x1 = ((x1 << ROTATION) | (x1 >> (32 - ROTATION))) ^ x0
    return x0, x1


@triton.jit
def _four(x0, x1, a, b, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr):
    x0, x1 = _round(x0, x1, R0)
    x0, x1 = _round(x0, x1, R1)
    x0, x1 = _round(x0, x1, R2)
    x0, x1 = _round(x0, x1, R3)
    return x0 + a, x1 + b


@triton.jit
def _bits(key0, key1, token, num_counters):
    """uint32, of the vocabulary's entries `token`."""
    second = token >= num_counters
    j = tl.where(second, token - num_counters, token).to(tl.uint32)
    key2 = key0 ^ key1 ^ _PARITY
    x0 = j + key0
    x1 = j + num_counters.to(tl.uint32) + key1
    x0, x1 = _four(x0, x1, key1, key2 + 1, _R0, _R1, _R2, _R3)
    x0, x1 = _four(x0, x1, key2, key0 + 2, _R4, _R5, _R6, _R7)
    x0, x1 = _four(x0, x1, key0, key1 + 3, _R0, _R1, _R2, _R3)
    x0, x1 = _four(x0, x1, key1, key2 + 4, _R4, _R5, _R6, _R7)
    x0, x1 = _four(x0, x1, key2, key0 + 5, _R0, _R1, _R2, _R3)
    return tl.where(second, x1, x0)


@triton.jit
def _largest_of_blocks(
    logits,
    noise,
    values,
    places,
    vocab_size,
    num_blocks,
    NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    wait_for_previous(PDL)
    row, block = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    at = row.to(tl.int64) * vocab_size + token
    x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    if NOISE:
        x = x * tl.load(noise.inverse_temperature + row)
        dropped = x < tl.load(noise.thresholds + row)
        key0 = tl.load(noise.keys + 2 * row).to(tl.uint32, bitcast=True)
        key1 = tl.load(noise.keys + 2 * row + 1).to(tl.uint32, bitcast=True)
        bits = _bits(key0, key1, token, (vocab_size + 1) // 2)
        coarse = 1.0 - (bits >> 9).to(tl.float32) * (2.0**-23)
        fine = (512 - (bits & 511).to(tl.int32)).to(tl.float32) * (2.0**-32)
        gumbel = -tl.log(fine - tl.log(coarse))
        x = tl.where(tl.load(noise.noisy + row) != 0, x + gumbel, x)
        x = tl.where(dropped & inside, x - _FAR, x)
    best = tl.max(x, axis=0)
    first = tl.min(tl.where((x == best) & inside, token, vocab_size), axis=0)
    tl.store(values + row * num_blocks + block, best)
    tl.store(places + row * num_blocks + block, first)


@triton.jit(do_not_specialize=["num_rows"])
def _largest_of_all(
    logits,
    values,
    places,
    slots,
    future,
    out,
    num_rows,
    vocab_size,
    num_blocks,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row 0 of `out` the tokens, row 1 whether a row's logits are NaN."""
    wait_for_previous(PDL)
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    x = tl.load(values + row * num_blocks + block, mask=inside, other=float("-inf"))
    place = tl.load(places + row * num_blocks + block, mask=inside, other=vocab_size)
    token = tl.min(tl.where(x == tl.max(x, axis=0), place, vocab_size), axis=0)
    token = tl.minimum(token, vocab_size - 1)
    first = tl.load(logits + row.to(tl.int64) * vocab_size).to(tl.float32)
    tl.store(out + row, token)
    tl.store(out + num_rows + row, (first != first).to(tl.int32))
    tl.store(future + tl.load(slots + row), token)


def draw(
    logits: torch.Tensor,  # [rows, vocab]
    slots: torch.Tensor,  # int32 [rows]; 0 for padding
    future: torch.Tensor,  # int32 [slots]: the future map
    out: torch.Tensor,  # int32 [2, rows]: tokens, and whether logits are NaN
    noise: Noise | None = None,  # None: all rows are greedy
) -> None:
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    values = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    places = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    _largest_of_blocks[(num_rows, num_blocks)](
        logits,
        noise,
        values,
        places,
        vocab_size,
        num_blocks,
        NOISE=noise is not None,
        BLOCK=BLOCK,
        num_warps=8,
        **dependent(logits.device),
    )
    _largest_of_all[(num_rows,)](
        logits,
        values,
        places,
        slots,
        future,
        out,
        num_rows,
        vocab_size,
        num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=1,
        **dependent(logits.device),
    )


def choose(
    logits: torch.Tensor,  # [rows, vocab]
    inputs: Inputs,
    future: torch.Tensor,  # int32 [slots]: the future map
    choice: Choice,
) -> torch.Tensor:
    """int32 [2, rows]: tokens, if they are not left to the sampler; whether logits are NaN."""
    drawn = torch.empty(2, logits.shape[0], dtype=torch.int32, device=logits.device)
    if choice is Choice.GREEDY:
        draw(logits, inputs.slot, future, drawn)
    elif choice is not Choice.LOGITS:
        least = _thresholds(logits, inputs, choice)
        noise = Noise(inputs.inverse_temperature, least, inputs.noisy, inputs.keys)
        draw(logits, inputs.slot, future, drawn, noise)
    else:
        drawn[1] = logits[:, 0].isnan()
    return drawn


def _thresholds(logits: torch.Tensor, inputs: Inputs, choice: Choice) -> torch.Tensor:
    """float32 [rows]: the least scaled logit that each row keeps."""
    least = least_kept(logits, inputs)
    if choice is not Choice.TOP_P:
        return least
    is_alone = is_top_p_alone(inputs)
    top_p = inputs.top_p.masked_fill(~is_alone, torch.inf)
    in_top_p = least_in_top_p(logits, top_p, inputs.min_p, inputs.inverse_temperature)
    return torch.where(is_alone, in_top_p, least)
