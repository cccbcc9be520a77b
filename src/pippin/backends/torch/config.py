"""A checkpoint's config.json as the numbers that our decoder needs. Reads no weights.

Families differ in a few switches; what none of these says is refused here, by name, before any
weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pippin.backends.torch.families.hybrids import (
    read_bamba,
    read_granite_hybrid,
    read_lfm2,
    read_nemotron_h,
)
from pippin.backends.torch.families.latent import read_latent
from pippin.backends.torch.families.parts import read_rope
from pippin.backends.torch.families.table import FAMILY, Family, read_options
from pippin.backends.torch.shapes import (
    NO_ROPE,
    Activation,
    ActivationKind,
    AttentionShape,
    ConvShape,
    DeltaShape,
    DenseShape,
    ExpertShape,
    LatentShape,
    LayerShape,
    MambaShape,
    MixerShape,
    MlpShape,
    ModelShape,
    Quantization,
    RopeShape,
    Scoring,
)
from pippin.errors import LoadError, UnsupportedLayout

Json = dict[str, Any]

LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite")
READERS: dict[str, Callable[[Json], ModelShape]] = {
    **dict.fromkeys(LATENT, read_latent),
    "bamba": read_bamba,
    "granitemoehybrid": read_granite_hybrid,
    "lfm2": read_lfm2,
    "lfm2_moe": read_lfm2,
    "nemotron_h": read_nemotron_h,
}
FAMILIES = (*FAMILY, *READERS)
NO_DRAFT_KERNELS = {
    LatentShape: "latent attention",
    MambaShape: "Mamba-2 layers",
    ConvShape: "short convolutions",
}
ACTIVATIONS: dict[str, ActivationKind] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_config(path: Path) -> Json:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path.name}: config.json cannot be read: {error}") from error
    except RecursionError as error:
        raise LoadError(f"{path.name}: config.json is nested too deeply to be read") from error
    if not isinstance(config, dict):
        raise LoadError(f"{path.name}: config.json is not an object")
    return config


def read_shape(config: Json) -> ModelShape:
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise UnsupportedLayout(
            f"{model_type} models are not served by the torch backend: it has {', '.join(FAMILIES)}"
        )
    try:
        read = READERS.get(model_type, partial(_shape, model_type=model_type))
        return replace(read(config), quantization=read_quantization(config))
    except KeyError as error:
        raise LoadError(f"config.json of this {model_type} lacks {error}") from error


def _shape(config: Json, model_type: str) -> ModelShape:
    family = FAMILY[model_type]
    stored: Json = config.get("text_config") or config
    text = read_options(stored, family)
    _refuse(stored | text, model_type)
    max_len = int(text.get("max_position_embeddings") or 4096)
    hidden, factor = int(text["hidden_size"]), float(text.get("embedding_multiplier", 1.0))
    logit_scale = float(text.get("logit_scale", 1.0)) / float(text.get("logits_scaling", 1.0))
    tied = text.get("tie_word_embeddings", False)
    return ModelShape(
        model_type=model_type,
        prefix="model.language_model." if "text_config" in config else "model.",
        vocab_size=int(text["vocab_size"]),
        hidden=hidden,
        eps=float(text["layer_norm_eps" if family.centred else "rms_norm_eps"]),
        max_len=max_len,
        tied=bool(config.get("tie_word_embeddings", tied)),
        layers=tuple(map(LayerShape, _mixers(text, family, max_len), _mlps(text, family))),
        norms=family.norms,
        norm_offset=family.norm_offset,
        centred_norms=family.centred,
        parallel=family.parallel,
        embed_scale=hidden**0.5 if family.scaled_embeddings else factor,
        residual_scale=float(text.get("residual_multiplier", 1.0)),
        logit_scale=logit_scale,
        logit_softcap=float(text.get("final_logit_softcapping") or 0.0),
    )


def suit_kernels(shape: ModelShape) -> bool:
    """Whether our kernels take it: heads of powers of two, 16 at least, cells in one table
    (`ModelShape.keeping_all`)."""
    if shape.window:
        return False
    sizes = [mixer.head_dim for mixer in shape.mixers(AttentionShape)]
    for latent in shape.mixers(LatentShape):
        sizes += [latent.rank, latent.rope.dim]
    if shape.recurrent is not None:
        sizes += [size for size in shape.recurrent.state_parts[1:] if size]
    return all(size >= 16 and size & (size - 1) == 0 for size in sizes)


def lacks_draft_kernels(shape: ModelShape) -> str | None:
    """Which of its layers our kernels of steps with drafts do not take; None: they take all."""
    mixers = [layer.mixer for layer in shape.layers]
    for kind, name in NO_DRAFT_KERNELS.items():
        if any(isinstance(mixer, kind) for mixer in mixers):
            return name
    return None


def _refuse(text: Json, model_type: str) -> None:
    if text.get("use_sliding_window") and "sliding_window" not in FAMILY[model_type].options:
        raise UnsupportedLayout(f"{model_type} with sliding windows is not served by torch")
    if text.get("use_bidirectional_attention"):
        raise UnsupportedLayout(f"{model_type} that reads both ways is not served by torch")
    if (name := _activation(text)) not in ACTIVATIONS:
        raise UnsupportedLayout(f"{model_type} with {name} is not served by torch")


def _activation(text: Json) -> str:
    return str(text.get("hidden_activation") or text.get("hidden_act") or "silu")


def _mixers(text: Json, family: Family, max_len: int) -> list[MixerShape]:
    num_layers = int(text["num_hidden_layers"])
    window = int(text.get("sliding_window") or 0)
    if not text.get("use_sliding_window", True):
        window = 0
    names = list(text.get("layer_types") or _layer_types(text, family, window, num_layers))
    found: list[MixerShape] = []
    for index, name in enumerate(names[:num_layers]):
        if name == "linear_attention" and family.is_hybrid:
            found.append(_delta(text))
        elif name == "full_attention" or (name == "sliding_attention" and window):
            own = window if name == "sliding_attention" else 0
            found.append(_attention(text, family, max_len, name, own, index))
        else:
            raise UnsupportedLayout(f"layers of type {name} are not served by torch")
    return found


def _layer_types(text: Json, family: Family, window: int, num_layers: int) -> list[str]:
    """As the families' own code has it, where a config does not say."""
    other = "linear_attention" if family.is_hybrid else "sliding_attention"
    if not window and not family.is_hybrid:
        return ["full_attention"] * num_layers
    if "max_window_layers" in text:
        num_full = int(text["max_window_layers"])
        is_full = [index < num_full for index in range(num_layers)]
    elif "no_rope_layers" in text:
        is_full = [_is_rotated(text, index) for index in range(num_layers)]
    else:
        every = family.full_every
        every = int(text.get("full_attention_interval") or every) if family.is_hybrid else every
        every = int(text.get("sliding_window_pattern") or every)
        is_full = [every > 0 and (index + 1) % every == 0 for index in range(num_layers)]
    return ["full_attention" if full else other for full in is_full]


def _is_rotated(text: Json, index: int) -> bool:
    """Of layers of which some do not turn their keys by position."""
    if text["no_rope_layers"] is not None:
        return bool(text["no_rope_layers"][index])
    return (index + 1) % int(text["no_rope_layer_interval"]) != 0


def _attention(
    text: Json, family: Family, max_len: int, name: str, window: int, index: int
) -> AttentionShape:
    num_heads = int(text["num_attention_heads"])
    head_dim = int(text.get("head_dim") or text["hidden_size"] // num_heads)
    is_biased = bool(text.get("attention_bias"))
    is_rotated = "no_rope_layers" not in text or _is_rotated(text, index)
    if family.parallel and "sliding_window" in text:  # cohere2
        is_rotated = window > 0
    scale = float(text.get("query_pre_attn_scalar", head_dim)) ** -0.5
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=int(text.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        rope=_rope(text, head_dim, max_len, name, family) if is_rotated else NO_ROPE,
        rope_pairs=family.rope_pairs,
        scale=float(text.get("attention_multiplier", scale)),
        softcap=float(text.get("attn_logit_softcapping") or 0.0),
        sinks=family.sinks,
        window=window,
        qk_norm=family.qk_norm if text.get("use_qk_norm", True) else None,
        qkv_bias=bool(text.get("qkv_bias")) or is_biased,
        out_bias=family.out_bias and is_biased,
        gated=family.is_hybrid,
    )


def _rope(text: Json, head_dim: int, max_len: int, name: str, family: Family) -> RopeShape:
    """`name`: the type of layer: types may differ."""
    is_windowed = name == "sliding_attention"
    options: Json = text.get("rope_parameters") or text.get("rope_scaling") or {}
    theta = text.get("rope_local_base_freq") if is_windowed else None
    if name in options:
        options = options[name]
    elif family.scales_rope_of_full and is_windowed:
        options = {}
    text = text | {"rope_parameters": options, "rope_scaling": None}
    text |= {} if theta is None else {"rope_theta": theta}
    return read_rope(text, head_dim, max_len, share=family.rope_share)


def _delta(text: Json) -> DeltaShape:
    return DeltaShape(
        num_k_heads=int(text["linear_num_key_heads"]),
        num_v_heads=int(text["linear_num_value_heads"]),
        k_dim=int(text["linear_key_head_dim"]),
        v_dim=int(text["linear_value_head_dim"]),
        num_taps=int(text["linear_conv_kernel_dim"]),
        interleaved=text["model_type"] == "qwen3_next",
    )


def _mlps(text: Json, family: Family) -> list[MlpShape]:
    num_layers = int(text["num_hidden_layers"])
    activation = Activation(ACTIVATIONS[_activation(text)])
    size = int(text.get("intermediate_size") or 0)
    dense = DenseShape(size, bool(text.get("mlp_bias")), activation=activation)
    if family.experts is None:
        return [dense] * num_layers
    every = int(text.get("decoder_sparse_step") or 1)
    num_dense, only_dense = text.get("first_k_dense_replace", 0), text.get("mlp_only_layers") or ()
    experts = _experts(text, family.experts, activation, biased=family.expert_bias)
    return [
        dense if (i + 1) % every != 0 or i < num_dense or i in only_dense else experts
        for i in range(num_layers)
    ]


def _experts(text: Json, scoring: Scoring, activation: Activation, *, biased: bool) -> ExpertShape:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((text[name] for name in names if name in text), None)
    if num_experts is None:
        raise KeyError(names[0])
    intermediate = int(text.get("moe_intermediate_size") or text["intermediate_size"])
    gated, plain = text.get("shared_expert_intermediate_size"), text.get("n_shared_experts")
    if limit := text.get("swiglu_limit"):
        activation = Activation("clamped", float(text.get("swiglu_alpha", 1.702)), float(limit))
    return ExpertShape(
        num_experts=int(num_experts),
        num_chosen=int(text["num_experts_per_tok"]),
        intermediate=intermediate,
        normalised=bool(text.get("norm_topk_prob", True)),
        shared_intermediate=int(gated or intermediate * int(plain or 0)),
        shared_gated=bool(gated),
        bias=biased,
        activation=activation,
        scoring=scoring,
        num_groups=int(text.get("n_group") or 1),
        num_groups_chosen=int(text.get("topk_group") or 1),
        scale=float(text.get("routed_scaling_factor") or 1.0),
    )


# ---- packed weights ------------------------------------------------------------------------------

METHODS = ("mlx", "fp8", "gptq", "awq", "compressed-tensors", "mxfp4")
MLX_MODES = {"affine": (4, 8), "mxfp4": (4,), "mxfp8": (8,)}  # and the bits that are served
COMPRESSED = ("pack-quantized", "float-quantized", "naive-quantized")


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
