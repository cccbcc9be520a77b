"""PTX that unpacks two numbers an instruction. Triton's interpreter has none: see `numbers.py`.

Pairs are of two words that lie side by side: their lower halves are one register, their upper
halves another. Each result has a part of either word, scaled and rounded once.

    bfloat16   Eight bits are an integer times 2 ** -133, whether or not it is so small that it has
               no leading one. So masking is all there is to do. What it is scaled by must not be
               too large for a bfloat16, so that weights are left 2 ** -15 of what they are.
    float16    Eight bits below the exponent of 1,024 are an integer more than that.
"""

from __future__ import annotations

from typing import Literal

from pippin.backends.torch.models.packed import Numbers

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
