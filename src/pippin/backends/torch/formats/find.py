"""One weight of a checkpoint by its name, packed or dense, whatever the format is.

Which weights are packed is what the checkpoint's names say: every format leaves some of them dense.
"""

from __future__ import annotations

from typing import Any

import torch

from pippin.backends.torch.checkpoint import Weights
from pippin.backends.torch.formats import floats, integers
from pippin.backends.torch.formats.quantization import Quantization
from pippin.backends.torch.models.packed import Weight


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
            return integers.read_mlx(
                take("weight"), take("scales"), take_if("biases"), bits, mode, dtype
            )
        case "gptq" if has("qweight"):
            return integers.read_gptq(
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
            return integers.read_awq(take("qweight"), take("qzeros"), take("scales"), dtype)
        case "compressed-tensors" if has("weight_packed"):
            packed, (_, size) = take("weight_packed"), take("weight_shape").tolist()
            bits = 4 if size == packed.shape[1] * 8 else 8
            scales, zeros = take("weight_scale"), take_if("weight_zero_point")
            if has("weight_g_idx"):
                integers.check_order(take("weight_g_idx"), size // scales.shape[1], name)
            return integers.read_compressed(packed, scales, zeros, size, bits, dtype)
        case "compressed-tensors" if has("weight_scale"):
            return floats.read_fp8(take("weight"), take("weight_scale"), None, dtype, name)
        case "mxfp4" if weights.has(f"{name}_blocks"):
            blocks, scales = (weights.stored(f"{name}_{part}") for part in ("blocks", "scales"))
            return floats.read_mxfp4(blocks, scales, dtype)
        case "fp8" if has("weight_scale_inv"):
            height, width = options.get("weight_block_size") or (128, 128)
            block = int(height), int(width)
            return floats.read_fp8(take("weight"), take("weight_scale_inv"), block, dtype, name)
    return None


def _of_layer(options: dict[str, Any], stored: str) -> dict[str, Any]:
    """mlx's options of one layer, which are by its stored name, or those of all."""
    each = options.get(stored.removesuffix(".weight"))
    return options | each if isinstance(each, dict) else options
