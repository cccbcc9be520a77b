"""What the bits of packed weights mean, inside kernels. Knows no products.

Nothing here needs a type that a GPU may lack: floats of 4 and 8 bits are half precision's with a
shorter exponent, and integers are put into a float's mantissa.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.packed.assembly import DOWN, registers, unpacking
from pippin.backends.torch.models.packed import BITS, Packed

_INT4_B, _INT4_H = (tl.constexpr(unpacking("int4", half)) for half in ("bf16x2", "f16x2"))
_INT8_B, _INT8_H = (tl.constexpr(unpacking("int8", half)) for half in ("bf16x2", "f16x2"))
_EIGHT, _FOUR = tl.constexpr(registers("int4")), tl.constexpr(registers("int8"))
_DOWN = tl.constexpr(DOWN)
KINDS = {"int4": 0, "int8": 1, "fp4": 2, "fp8": 3}
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


def two_at_a_time(x: torch.Tensor, weight: Packed) -> bool:
    """Whether a GPU unpacks it two numbers an instruction."""
    stored = [array.dtype for array in arrays_of(weight)[1:]]
    half = x.dtype in (torch.bfloat16, torch.float16) and stored == [x.dtype, x.dtype]
    return half and weight.numbers in ("int4", "int8") and x.is_cuda


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
def _weight_of(words, scale, offset, PART: tl.constexpr, KIND: tl.constexpr, DTYPE: tl.constexpr):
    found = number(words, PART, KIND) * scale.to(tl.float32) + offset.to(tl.float32)
    return found.to(DTYPE)


@triton.jit
def weights_of(
    words,
    scale,
    offset,
    KIND: tl.constexpr,
    PER_WORD: tl.constexpr,
    DTYPE: tl.constexpr,
    TWO_AT_A_TIME: tl.constexpr,
):
    """Parts of words, scaled and rounded once: [..., 2, 2, 2] of eight, [..., 2, 2] of four."""
    if TWO_AT_A_TIME:
        if KIND == _INT4 and tl.bfloat16 == DTYPE:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                _INT4_B, _EIGHT, [words, scale, offset], (tl.bfloat16,) * 8, True, 2
            )
        elif KIND == _INT4:
            a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
                _INT4_H, _EIGHT, [words, scale, offset], (tl.float16,) * 8, True, 2
            )
        elif tl.bfloat16 == DTYPE:
            a, b, c, d = tl.inline_asm_elementwise(
                _INT8_B, _FOUR, [words, scale, offset], (tl.bfloat16,) * 4, True, 2
            )
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                _INT8_H, _FOUR, [words, scale, offset], (tl.float16,) * 4, True, 2
            )
    else:
        a = _weight_of(words, scale, offset, 0, KIND, DTYPE)
        b = _weight_of(words, scale, offset, 1, KIND, DTYPE)
        c = _weight_of(words, scale, offset, 2, KIND, DTYPE)
        d = _weight_of(words, scale, offset, 3, KIND, DTYPE)
        if PER_WORD == 8:
            e = _weight_of(words, scale, offset, 4, KIND, DTYPE)
            f = _weight_of(words, scale, offset, 5, KIND, DTYPE)
            g = _weight_of(words, scale, offset, 6, KIND, DTYPE)
            h = _weight_of(words, scale, offset, 7, KIND, DTYPE)
    found = tl.join(tl.join(a, c), tl.join(b, d))
    if PER_WORD == 8:
        more = tl.join(tl.join(e, g), tl.join(f, h))
        found = tl.permute(tl.join(found, more), [0, 1, 4, 2, 3])
    return found


@triton.jit
def restored(sums, DTYPE: tl.constexpr, TWO_AT_A_TIME: tl.constexpr):
    """Of sums of `weights_of` times x: those of the weights themselves."""
    return sums / _DOWN if TWO_AT_A_TIME and tl.bfloat16 == DTYPE else sums


@triton.jit
def factor(scales, at, mask):
    """float32: scales that are numbers, or exponents of 2."""
    found = tl.load(scales + at, mask=mask, other=0)
    if scales.dtype.element_ty == tl.uint8:
        found = (found.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return found.to(tl.float32)
