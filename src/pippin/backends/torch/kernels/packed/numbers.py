"""What the bits of packed weights mean, inside kernels.

Nothing here needs a type that a GPU may lack: floats of 4 and 8 bits are half precision's with a
shorter exponent, and integers are put into a float's mantissa.

On NVIDIA GPUs PTX unpacks two numbers an instruction; Triton's interpreter has none. Pairs are of
two words that lie side by side: their lower halves are one register, their upper halves another.
Each result has a part of either word, scaled and rounded once.

    bfloat16   Eight bits are an integer times 2 ** -133, whether or not it is so small that it has
               no leading one. So masking is all there is to do. What it is scaled by must not be
               too large for a bfloat16, so that weights are left 2 ** -15 of what they are.
    float16    Eight bits below the exponent of 1,024 are an integer more than that.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from pippin.backends.torch.models.packed import BITS, Numbers, Packed

Half = Literal["bf16x2", "f16x2"]
DOWN = 2.0**-15  # of weights in bfloat16
# For each part of a half of two words: how far it is shifted, a mask, and the name of a factor.
_INTEGERS = {
    "int4": [(0, 0x000F, "low"), (0, 0x00F0, "high"), (8, 0x000F, "low"), (8, 0x00F0, "high")],
    "int8": [(0, 0x00FF, "low"), (8, 0x00FF, "low")],
}
# 2 ** 118, 114 and -15; 1 and 1 / 16, and what is left to subtract of 1,024
_CONSTANTS = {
    "bf16x2": {"up": 0x7A80, "less": 0x7880, "down": 0x3800, "zero": 0x8000},
    "f16x2": {"magic": 0x6400, "one": 0x3C00, "less": 0x2C00, "low": 0xE400, "high": 0xD400},
}


def _twice(bits: int) -> str:
    return f"0x{bits:04x}{bits:04x}"


def unpacking(numbers: Numbers, half: Half) -> str:
    """Of two words, scales and offsets: registers, in this order behind those of the results."""
    parts = _INTEGERS[numbers]
    first = 2 * len(parts)
    words, scale, offset = f"${first}, ${first + 1}", f"${first + 2}", f"${first + 3}"
    fma = f"fma.rn.{half}"
    steps = [".reg .b32 lower, upper, at, s_low, s_high, o;"]
    for name, bits in _CONSTANTS[half].items():
        steps.append(f".reg .b32 {name}; mov.b32 {name}, {_twice(bits)};")
    steps.append(f"prmt.b32 lower, {words}, 0x5410; prmt.b32 upper, {words}, 0x7632;")
    if half == "bf16x2":
        steps.append(f"{fma} s_low, {scale}, up, zero; {fma} s_high, {scale}, less, zero;")
        steps.append(f"{fma} o, {offset}, down, zero;")
    for result in range(first):
        shift, mask, factor = parts[result % len(parts)]
        where = "lower" if result < len(parts) else "upper"
        if shift:
            steps.append(f"shr.b32 at, {where}, {shift};")
            where = "at"
        if half == "bf16x2":
            steps.append(f"and.b32 ${result}, {where}, {_twice(mask)};")
            steps.append(f"{fma} ${result}, ${result}, s_{factor}, o;")
        else:
            steps.append(f"lop3.b32 ${result}, {where}, {_twice(mask)}, magic, 0xea;")
            by = "one" if factor == "low" else "less"
            steps.append(f"{fma} ${result}, ${result}, {by}, {factor};")
            steps.append(f"{fma} ${result}, ${result}, {scale}, {offset};")
    return "{ " + " ".join(steps) + " }"


def registers(numbers: Numbers) -> str:
    return ",".join(["=&r"] * (2 * len(_INTEGERS[numbers])) + ["r"] * 4)


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
