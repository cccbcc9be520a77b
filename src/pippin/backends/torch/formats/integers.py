"""Packed integers of mlx, GPTQ, AWQ and compressed-tensors. Knows no config.json.

All store words of 32 bits whose lowest bits are the first number; they differ in what lies side by
side in a word, and in how the number that stands for zero is stored.
"""

from __future__ import annotations

import torch

from pippin.backends.torch.models.packed import Numbers, Packed, pack
from pippin.errors import LoadError

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of neighbouring columns
NUMBERS: dict[int, Numbers] = {4: "int4", 8: "int8"}


def codes_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., n] of words of 32 bits, the lowest ones first."""
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack([octets & 0xF, octets >> 4], dim=-1).flatten(-2)


def read_mlx(
    words: torch.Tensor,  # uint32 [..., rows, n * bits / 32]
    scales: torch.Tensor,  # [..., rows, groups]
    biases: torch.Tensor | None,
    bits: int,
    mode: str,
    dtype: torch.dtype,
) -> Packed:
    """`affine`: with biases. `mxfp4`, `mxfp8`: floats, and scales that are exponents."""
    numbers: Numbers = NUMBERS[bits] if mode == "affine" else "fp4" if bits == 4 else "fp8"
    return pack(codes_of(words, bits), scales, biases, numbers, dtype)


def read_gptq(
    words: torch.Tensor,  # int32 [n * bits / 32, rows]
    zeros: torch.Tensor,  # int32 [groups, rows * bits / 32]
    scales: torch.Tensor,  # [groups, rows]
    order: torch.Tensor | None,  # [n]: the group of each number
    bits: int,
    *,
    less_one: bool,  # how zeros are stored, by all but version 2 of the format
    dtype: torch.dtype,
    name: str,
) -> Packed:
    codes = codes_of(words.T, bits)
    if order is not None:
        check_order(order, codes.shape[-1] // scales.shape[0], name)
    middle = codes_of(zeros, bits).T.float() + float(less_one)
    return pack(codes, scales.T, _offsets(middle, scales.T), NUMBERS[bits], dtype)


def read_awq(
    words: torch.Tensor,  # int32 [n, rows / 8]
    zeros: torch.Tensor,  # int32 [groups, rows / 8]
    scales: torch.Tensor,  # [groups, rows]
    dtype: torch.dtype,
) -> Packed:
    places = torch.tensor(AWQ_PLACES, device=words.device)

    def columns(packed: torch.Tensor) -> torch.Tensor:
        """[rows, n] of [n, rows / 8]"""
        return codes_of(packed, 4).unflatten(-1, (-1, 8))[..., places].flatten(-2).T

    middle = columns(zeros).float()
    return pack(columns(words), scales.T, _offsets(middle, scales.T), "int4", dtype)


def read_compressed(
    words: torch.Tensor,  # int32 [rows, n * bits / 32]
    scales: torch.Tensor,  # [rows, groups]
    zeros: torch.Tensor | None,  # int32 [rows * bits / 32, groups]; None: symmetric
    num_columns: int,
    bits: int,
    dtype: torch.dtype,
) -> Packed:
    """Signed numbers are stored plus half of their range, and so are zeros."""
    middle = torch.full_like(scales, 1 << (bits - 1), dtype=torch.float32)
    if zeros is not None:
        middle = codes_of(zeros.T, bits)[:, : scales.shape[0]].T.float()
    codes = codes_of(words, bits)[:, :num_columns]
    return pack(codes, scales, _offsets(middle, scales), NUMBERS[bits], dtype)


def check_order(order: torch.Tensor, size: int, name: str) -> None:
    """`order`: the group of each number, of groups of `size`."""
    if not torch.equal(order.long(), torch.arange(len(order), device=order.device) // size):
        raise LoadError(
            f"{name} is quantized in an order of its own (desc_act, actorder), which the torch"
            " backend does not serve: use a checkpoint that is quantized without it"
        )


def _offsets(middle: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """-middle * scale; as short as the scales, where that is exact."""
    exact = -middle * scales.float()
    short = exact.to(scales.dtype)
    return (short if torch.equal(short.float(), exact) else exact).contiguous()
