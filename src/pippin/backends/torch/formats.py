"""Packed weights as checkpoints store them, read into the one form that products read.

Which weights are packed is what the checkpoint's names say: every format leaves some of them dense.
All packed integers are words of 32 bits whose lowest bits are the first number; formats differ in
what lies side by side in a word, and in how the number that stands for zero is stored.
"""

from __future__ import annotations

from typing import Any

import torch

from pippin.backends.torch.checkpoint import Weights
from pippin.backends.torch.models.packed import GROUPS, Numbers, Packed, Weight, pack
from pippin.backends.torch.shapes import Quantization
from pippin.errors import LoadError

Json = dict[str, Any]


def read_fp8(
    weight: torch.Tensor,  # float8_e4m3fn [rows, n]
    scales: torch.Tensor,  # of blocks [rows / height, n / width], of rows [rows, 1], or one
    block: tuple[int, int] | None,  # height and width; None: as many as there are scales
    dtype: torch.dtype,
    name: str,
) -> Packed:
    """One scale for each group of a row: blocks' are repeated, 3% of the weight at 128."""
    if weight.dtype != torch.float8_e4m3fn:
        raise LoadError(
            f"{name} is stored as {weight.dtype}: of FP8 weights float8_e4m3fn is served"
        )
    num_rows, size = weight.shape
    scales = scales.float().reshape(scales.shape if scales.dim() == 2 else (-1, 1))
    height, width = block or (-(-num_rows // scales.shape[0]), size // scales.shape[1])
    group = next((g for g in GROUPS if size % g == 0 and width % g == 0), None)
    if group is None:
        raise LoadError(
            f"{name} has rows of {size} numbers in blocks of {width}: multiples of {GROUPS[-1]} are"
            " served"
        )
    by_row = scales.repeat_interleave(height, dim=0)[:num_rows]
    by_group = by_row.repeat_interleave(width // group, dim=1)[:, : size // group]
    return pack(weight.view(torch.uint8), by_group, None, "fp8", dtype)


def read_mxfp4(
    blocks: torch.Tensor,  # uint8 [..., rows, groups, 16]: two numbers each, the lower bits first
    scales: torch.Tensor,  # uint8 [..., rows, groups]: exponents of 2, plus 127
    dtype: torch.dtype,
) -> Packed:
    codes = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-3)
    return pack(codes, scales, None, "fp4", dtype)


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


def find_weight(
    weights: Weights, quantization: Quantization | None, name: str, dtype: torch.dtype
) -> Weight:
    """`name`: of a layer, without `.weight`."""
    found = None if quantization is None else _packed(weights, quantization, name, dtype)
    return weights.take(f"{name}.weight") if found is None else found


def _packed(
    weights: Weights, quantization: Quantization, name: str, dtype: torch.dtype
) -> Weight | None:
    options = quantization.options

    def has(part: str) -> bool:
        return weights.has(f"{name}.{part}")

    def take(part: str) -> torch.Tensor:
        return weights.stored(f"{name}.{part}")

    def take_if(part: str) -> torch.Tensor | None:
        return take(part) if has(part) else None

    match quantization.method:
        case "mlx" if has("scales"):
            each = _of_layer(options, weights.name_in_file(f"{name}.weight"))
            mode, bits = str(each.get("mode", "affine")), int(each["bits"])
            return read_mlx(take("weight"), take("scales"), take_if("biases"), bits, mode, dtype)
        case "gptq" if has("qweight"):
            return read_gptq(
                take("qweight"),
                take("qzeros"),
                take("scales"),
                take_if("g_idx"),
                int(options["bits"]),
                less_one=options.get("checkpoint_format") != "gptq_v2",
                dtype=dtype,
                name=name,
            )
        case "awq" if has("qweight"):
            return read_awq(take("qweight"), take("qzeros"), take("scales"), dtype)
        case "compressed-tensors" if has("weight_packed"):
            packed, (_, size) = take("weight_packed"), take("weight_shape").tolist()
            bits = 4 if size == packed.shape[1] * 8 else 8
            scales, zeros = take("weight_scale"), take_if("weight_zero_point")
            if has("weight_g_idx"):
                check_order(take("weight_g_idx"), size // scales.shape[1], name)
            return read_compressed(packed, scales, zeros, size, bits, dtype)
        case "compressed-tensors" if has("weight_scale"):
            return read_fp8(take("weight"), take("weight_scale"), None, dtype, name)
        case "mxfp4" if weights.has(f"{name}_blocks"):
            blocks, scales = (weights.stored(f"{name}_{part}") for part in ("blocks", "scales"))
            return read_mxfp4(blocks, scales, dtype)
        case "fp8" if has("weight_scale_inv"):
            height, width = options.get("weight_block_size") or (128, 128)
            block = int(height), int(width)
            return read_fp8(take("weight"), take("weight_scale_inv"), block, dtype, name)
    return None


def _of_layer(options: dict[str, Any], stored: str) -> dict[str, Any]:
    """mlx's options of one layer, which are by its stored name, or those of all."""
    each = options.get(stored.removesuffix(".weight"))
    return options | each if isinstance(each, dict) else options
