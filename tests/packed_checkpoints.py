"""Checkpoints that are quantized as other programs store them, written from their definitions.

Each format is a function from a weight to the tensors that stand for it, and to the weight that
these tensors mean, computed here without any packing. Knows nothing of Pippin.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from torch_families import TORCH_CONFIGS, weights

GROUP = 32


class Packing(NamedTuple):
    tensors: dict[str, torch.Tensor]  # by what follows the layer's name
    means: torch.Tensor


def words_of(codes: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """int32: numbers side by side in `dim`, the first (or order's first) in the lowest bits."""
    per_word = 32 // bits
    parts = codes.long().unflatten(dim, (-1, per_word)).movedim(dim + 1 if dim >= 0 else dim, -1)
    order = order or tuple(range(per_word))
    words = sum(parts[..., number] << (bits * place) for place, number in enumerate(order))
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def integers(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [rows, n], scales and zeros [rows, groups] that differ from group to group."""
    grouped = weight.unflatten(1, (-1, GROUP))
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = (-low / scales.float()).round().clamp(1, 2**bits - 1)
    codes = (grouped / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return codes.flatten(1), scales, zeros


def meant(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    grouped = codes.unflatten(1, (-1, GROUP)) - zeros[..., None]
    return (grouped * scales.float()[..., None]).flatten(1)


def gptq(weight: torch.Tensor, bits: int = 4, *, less_one: bool = True) -> Packing:
    codes, scales, zeros = integers(weight, bits)
    tensors = {
        "qweight": words_of(codes.T, bits, 0),
        "qzeros": words_of(zeros.T - float(less_one), bits, 1),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }
    return Packing(tensors, meant(codes, scales, zeros))


def awq(weight: torch.Tensor) -> Packing:
    codes, scales, zeros = integers(weight, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words_of(codes.T, 4, 1, order),
        "qzeros": words_of(zeros.T, 4, 1, order),
        "scales": scales.T.contiguous(),
    }
    return Packing(tensors, meant(codes, scales, zeros))


def compressed(weight: torch.Tensor, bits: int = 4, *, symmetric: bool = True) -> Packing:
    codes, scales, zeros = integers(weight, bits)
    if symmetric:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    tensors = {
        "weight_packed": words_of(codes, bits, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words_of(zeros, bits, 0)
    return Packing(tensors, meant(codes, scales, zeros))


def fp8(weight: torch.Tensor, block: tuple[int, int] = (128, 128)) -> Packing:
    height, width = block
    num_rows, size = weight.shape
    scales = torch.empty(-(-num_rows // height), -(-size // width))
    whole = torch.empty_like(weight)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = (
                slice(row * height, (row + 1) * height),
                slice(column * width, (column + 1) * width),
            )
            scales[row, column] = weight[part].abs().max() / 448.0
            whole[part] = scales[row, column]
    packed = (weight / whole).to(torch.float8_e4m3fn)
    return Packing({"weight": packed, "weight_scale_inv": scales}, packed.float() * whole)


def write(
    path: Path, quantization: dict[str, object], pack: Callable[..., Packing]
) -> tuple[Path, Path]:
    """A Llama whose projections are packed, and a dense one of the weights that these mean."""
    config, dense = TORCH_CONFIGS["llama"], weights(TORCH_CONFIGS["llama"])
    packed = {}
    for name, weight in list(dense.items()):
        if not name.endswith("_proj.weight"):
            packed[name] = weight
            continue
        tensors, dense[name] = pack(weight)
        layer = name.removesuffix("weight")
        packed |= {f"{layer}{part}": tensor for part, tensor in tensors.items()}
    made = []
    for kind, tensors, extra in (
        ("packed", packed, {"quantization_config": quantization}),
        ("dense", dense, {}),
    ):
        made.append(path / kind)
        made[-1].mkdir()
        (made[-1] / "config.json").write_text(json.dumps(config | extra))
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, made[-1] / "model.safetensors", {"format": "pt"})
    return made[0], made[1]
