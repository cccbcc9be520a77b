"""What the bits of packed weights mean, inside kernels. Knows no products.

Nothing here needs a type that a GPU may lack: floats of 4 and 8 bits are half precision's with a
shorter exponent, and integers are put into a float's mantissa.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pippin.backends.torch.models.packed import BITS, Packed

KINDS = {"int4": 0, "int8": 1, "fp4": 2, "fp8": 3}
_LIFT = 100  # as a power of 2, so that products with what lies that low are of a usual size
_RISE = tl.constexpr(2.0 ** (149 - _LIFT))
_INT4, _INT8, _FP4 = (tl.constexpr(KINDS[name]) for name in ("int4", "int8", "fp4"))


class PackedArrays(NamedTuple):
    """One of the kernels' arguments."""

    words: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor  # the scales, where there are none


def arrays_of(weight: Packed) -> PackedArrays:
    offsets = weight.scales if weight.offsets is None else weight.offsets
    found = PackedArrays(weight.words, weight.scales, offsets)
    assert all(array.is_contiguous() for array in found)
    return found


def constants_of(weight: Packed) -> dict[str, int | bool]:
    """Constants of every kernel that reads it."""
    return {
        "KIND": KINDS[weight.numbers],
        "GROUP": weight.group,
        "PER_WORD": 32 // BITS[weight.numbers],
        "OFFSET": weight.offsets is not None,
    }


@triton.constexpr_function
def _shift_of(part, kind):
    """By how much a word is shifted so that all of a part is among its lowest 24 bits."""
    bits = 4 if kind == _INT4 else 8
    return 8 if (part + 1) * bits > 24 else 0


@triton.constexpr_function
def _mask_of(part, kind):
    bits = 4 if kind == _INT4 else 8
    return (2**bits - 1) << (part * bits - _shift_of(part, kind))


@triton.constexpr_function
def _lift_of(part, kind):
    bits = 4 if kind == _INT4 else 8
    return 2.0 ** (_LIFT - part * bits + _shift_of(part, kind))


@triton.jit
def sunk(words, PART: tl.constexpr, KIND: tl.constexpr):
    """float32: a part of each word. Of integers, times 2 ** (its place - 149): 24 bits of a word
    are a float of that size as they are, so that masking is all there is to do."""
    if KIND <= _INT8:
        part = words >> _shift_of(PART, KIND) if _shift_of(PART, KIND) > 0 else words
        found = (part & _mask_of(PART, KIND)).to(tl.float32, bitcast=True)
    else:
        found = number(words, PART, KIND)
    return found


@triton.jit
def lifted(x, PART: tl.constexpr, KIND: tl.constexpr):
    """float32: what a part of each word, as `sunk`, is multiplied with."""
    return x * _lift_of(PART, KIND) if KIND <= _INT8 else x


@triton.jit
def risen(sums, KIND: tl.constexpr):
    """Of sums of `sunk` times `lifted`: those of the numbers themselves."""
    return sums * _RISE if KIND <= _INT8 else sums


@triton.jit
def raised(words, PART: tl.constexpr, KIND: tl.constexpr):
    """float32: a part of each word, of 4 bits plus 128, of 8 bits plus 256."""
    if KIND == _INT4:
        # The bits are the highest of a mantissa, of what lies between 128 and 256.
        bits = words << (16 - 4 * PART) if PART < 4 else words >> (4 * PART - 16)
        found = ((bits & 0xF0000) | 0x43000000).to(tl.float32, bitcast=True)
    elif KIND == _INT8:
        bits = words << (15 - 8 * PART) if PART < 2 else words >> (8 * PART - 15)
        found = ((bits & 0x7F8000) | 0x43800000).to(tl.float32, bitcast=True)
    elif KIND == _FP4:
        code = words >> (4 * PART)
        half = ((code & 0x7) << 9) | ((code & 0x8) << 12)
        found = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    else:
        code = words >> (8 * PART)
        half = ((code & 0x7F) << 7) | ((code & 0x80) << 8)
        found = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return found


@triton.jit
def number(words, PART: tl.constexpr, KIND: tl.constexpr):
    """float32: a part of each word."""
    found = raised(words, PART, KIND)
    if KIND == _INT4:
        found -= 128.0
    if KIND == _INT8:
        found -= 256.0
    return found


@triton.jit
def factor(scales, at, mask):
    """float32: scales that are numbers, or exponents of 2."""
    found = tl.load(scales + at, mask=mask, other=0)
    if scales.dtype.element_ty == tl.uint8:
        found = (found.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return found.to(tl.float32)


@triton.jit
def packed_sums(
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
