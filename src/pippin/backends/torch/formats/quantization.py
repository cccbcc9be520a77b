"""How a checkpoint's config.json says that its weights are packed. Reads no weights.

What is not served is refused here, by name, before any weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pippin.errors import LoadError

Json = dict[str, Any]
METHODS = ("mlx", "fp8", "gptq", "awq", "compressed-tensors", "mxfp4")
MLX_MODES = {"affine": (4, 8), "mxfp4": (4,), "mxfp8": (8,)}  # and the bits that are served
COMPRESSED = ("pack-quantized", "float-quantized", "naive-quantized")


@dataclass(frozen=True)
class Quantization:
    method: str
    options: Json = field(default_factory=dict)


def read_quantization(config: Json) -> Quantization | None:
    """None: the weights are dense."""
    text: Json = config.get("text_config") or {}
    if isinstance(found := config.get("quantization"), dict):
        return _mlx(found)
    found = config.get("quantization_config", text.get("quantization_config"))
    if found is None:
        return None
    if not isinstance(found, dict):
        raise LoadError(f"quantization_config of config.json is {found!r}, not an object")
    method = str(found.get("quant_method"))
    if method not in METHODS[1:]:
        raise LoadError(
            f"weights quantized by {method} are not served by the torch backend: it has"
            f" {', '.join(METHODS)}"
        )
    check = {"gptq": _check_gptq, "awq": _check_awq, "compressed-tensors": _check_compressed}
    check.get(method, lambda _: None)(found)
    return Quantization(method, found)


def _mlx(options: Json) -> Quantization:
    layers = [value for value in options.values() if isinstance(value, dict)]
    for each in (options, *layers):
        mode, bits = str(each.get("mode", "affine")), each.get("bits")
        if mode not in MLX_MODES:
            raise LoadError(
                f"weights quantized by mlx's {mode} are not served by the torch backend: it has"
                f" {', '.join(MLX_MODES)}"
            )
        if bits not in MLX_MODES[mode]:
            raise LoadError(
                f"weights of {bits} bits (mlx's {mode}) are not served by the torch backend: it has"
                f" {' and '.join(map(str, MLX_MODES[mode]))} bits; convert the model with"
                " mlx_lm.convert --q-bits 4"
            )
    return Quantization("mlx", options)


def _check_gptq(options: Json) -> None:
    if options.get("bits") not in (4, 8):
        raise LoadError(f"GPTQ weights of {options.get('bits')} bits are not served: 4 and 8 are")


def _check_awq(options: Json) -> None:
    bits, version = options.get("bits", options.get("w_bit")), options.get("version", "gemm")
    if bits != 4 or str(version).lower() != "gemm":
        raise LoadError(
            f"AWQ weights of {bits} bits in version {version} are not served: 4 bits in version"
            " gemm are"
        )


def _check_compressed(options: Json) -> None:
    form = str(options.get("format"))
    if form not in COMPRESSED:
        raise LoadError(
            f"compressed-tensors of format {form} are not served by the torch backend: it has"
            f" {', '.join(COMPRESSED)}"
        )
    for name, scheme in (options.get("config_groups") or {}).items():
        weights = scheme.get("weights") or {}
        bits, kind = weights.get("num_bits"), weights.get("type", "int")
        served = (4, 8) if form == "pack-quantized" else (8,)
        wanted = "int" if form == "pack-quantized" else "float"
        if bits not in served or kind != wanted:
            raise LoadError(
                f"compressed-tensors of format {form} with weights of {bits} bits, type {kind}"
                f" ({name}), are not served: {' and '.join(map(str, served))} bits of type"
                f" {wanted} are"
            )
