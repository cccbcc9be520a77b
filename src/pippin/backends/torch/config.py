"""A checkpoint's config.json as the numbers that our decoder needs. Reads no weights.

Families differ in a few switches; what none of these says is refused here, by name, before any
weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pippin.backends.torch.families.lfm2 import read_lfm2
from pippin.backends.torch.families.nemotron_h import read_nemotron_h
from pippin.backends.torch.families.rope import read_rope
from pippin.backends.torch.shapes import (
    AttentionShape,
    DeltaShape,
    DenseShape,
    ExpertShape,
    LayerShape,
    MixerShape,
    MlpShape,
    ModelShape,
)
from pippin.errors import LoadError, UnsupportedLayout

Json = dict[str, Any]

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next"),
    *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    *("lfm2", "nemotron_h"),
)
READERS: dict[str, Callable[[Json], ModelShape]] = {
    "lfm2": read_lfm2,
    "nemotron_h": read_nemotron_h,
}


def read_config(path: Path) -> Json:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path.name}: config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise LoadError(f"{path.name}: config.json is not an object")
    return config


def read_shape(config: Json) -> ModelShape:
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise UnsupportedLayout(
            f"{model_type} models are not served by the torch backend: it has {', '.join(FAMILIES)}"
        )
    if "quantization_config" in config or "quantization" in config:
        raise LoadError(f"quantized {model_type} checkpoints are not served by the torch backend")
    try:
        if (read := READERS.get(model_type)) is not None:
            return read(config)
        return _shape(config, model_type)
    except KeyError as error:
        raise LoadError(f"config.json of this {model_type} lacks {error}") from error


def _shape(config: Json, model_type: str) -> ModelShape:
    text: Json = config.get("text_config") or config
    family = model_type.removesuffix("_text")
    is_hybrid = family in ("qwen3_next", "qwen3_5", "qwen3_5_moe")
    _refuse(text, model_type)
    window = _window(text, family)
    max_len = int(text.get("max_position_embeddings") or 4096)
    mixers = _mixers(text, family, window, max_len, is_hybrid=is_hybrid)
    return ModelShape(
        model_type=model_type,
        prefix="model.language_model." if "text_config" in config else "model.",
        vocab_size=int(text["vocab_size"]),
        hidden=int(text["hidden_size"]),
        eps=float(text["rms_norm_eps"]),
        max_len=max_len,
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        layers=tuple(map(LayerShape, mixers, _mlps(text, family))),
        norm_offset=1.0 if is_hybrid else 0.0,
    )


def suit_kernels(shape: ModelShape) -> bool:
    """Whether our kernels take it: heads of powers of two, 16 at least, no windows, and recurrent
    layers of Gated DeltaNet alone."""
    if shape.window or not isinstance(shape.recurrent, DeltaShape | None):
        return False
    sizes = [mixer.head_dim for mixer in shape.mixers(AttentionShape)]
    for delta in shape.mixers(DeltaShape):
        sizes += [delta.k_dim, delta.v_dim]
    return all(size >= 16 and size & (size - 1) == 0 for size in sizes)


def _refuse(text: Json, model_type: str) -> None:
    if text.get("use_sliding_window") and model_type not in ("qwen2", "qwen3"):
        raise UnsupportedLayout(f"{model_type} with sliding windows is not served by torch")
    if text.get("hidden_act", "silu") != "silu":
        raise UnsupportedLayout(f"{model_type} with {text['hidden_act']} is not served by torch")


def _window(text: Json, family: str) -> int | None:
    """Tokens that layers of type `sliding_attention` see."""
    if family == "mistral":  # whose configs may omit it
        return int(text.get("sliding_window", 4096) or 0) or None
    if family in ("qwen2", "qwen3") and not text.get("use_sliding_window"):
        return None
    return int(text.get("sliding_window") or 0) or None


def _mixers(
    text: Json, family: str, window: int | None, max_len: int, *, is_hybrid: bool
) -> list[MixerShape]:
    num_layers = int(text["num_hidden_layers"])
    names = text.get("layer_types") or _layer_types(text, window, is_hybrid, num_layers)
    full = _attention(text, family, max_len, is_hybrid=is_hybrid)
    kinds: dict[str, MixerShape] = {"full_attention": full}
    if is_hybrid:
        kinds["linear_attention"] = _delta(text, interleaved=family == "qwen3_next")
    elif window is not None:
        kinds["sliding_attention"] = replace(full, window=window)
    if unknown := set(names) - set(kinds):
        raise UnsupportedLayout(f"layers of type {min(unknown)} are not served by torch")
    return [kinds[name] for name in names]


def _attention(text: Json, family: str, max_len: int, *, is_hybrid: bool) -> AttentionShape:
    num_heads = int(text["num_attention_heads"])
    head_dim = int(text.get("head_dim") or text["hidden_size"] // num_heads)
    # Mistral's and Qwen2's own code reads no such switch.
    is_biased = family not in ("mistral", "qwen2") and bool(text.get("attention_bias"))
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=int(text.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        rope=read_rope(text, head_dim, max_len, share=0.25 if is_hybrid else 1.0),
        qk_norm=family.startswith("qwen3"),
        qkv_bias=family == "qwen2" or is_biased,
        out_bias=is_biased,
        gated=is_hybrid,
    )


def _layer_types(text: Json, window: int | None, is_hybrid: bool, num_layers: int) -> list[str]:
    """As the families' own code has it, where a config does not say."""
    if is_hybrid:
        every = int(text.get("full_attention_interval") or 4)
        is_full = [(index + 1) % every == 0 for index in range(num_layers)]
        return ["full_attention" if full else "linear_attention" for full in is_full]
    match str(text["model_type"]):
        case "mistral" if window is not None:
            num_full = 0
        case "qwen2" | "qwen3" if window is not None:
            num_full = int(text.get("max_window_layers", 28))
        case _:
            num_full = num_layers
    is_full = [index < num_full for index in range(num_layers)]
    return ["full_attention" if full else "sliding_attention" for full in is_full]


def _delta(text: Json, *, interleaved: bool) -> DeltaShape:
    return DeltaShape(
        num_k_heads=int(text["linear_num_key_heads"]),
        num_v_heads=int(text["linear_num_value_heads"]),
        k_dim=int(text["linear_key_head_dim"]),
        v_dim=int(text["linear_value_head_dim"]),
        num_taps=int(text["linear_conv_kernel_dim"]),
        interleaved=interleaved,
    )


def _mlps(text: Json, family: str) -> list[MlpShape]:
    num_layers = int(text["num_hidden_layers"])
    biased = family == "llama" and bool(text.get("mlp_bias"))
    dense = DenseShape(int(text.get("intermediate_size") or 0), biased)
    if family not in ("qwen3_moe", "qwen3_next", "qwen3_5_moe"):
        return [dense] * num_layers
    every = int(text.get("decoder_sparse_step") or 1)
    only_dense = set(text.get("mlp_only_layers") or ())
    experts = ExpertShape(
        num_experts=int(text["num_experts"]),
        num_chosen=int(text["num_experts_per_tok"]),
        intermediate=int(text["moe_intermediate_size"]),
        normalised=family == "qwen3_5_moe"
        or bool(text.get("norm_topk_prob", family == "qwen3_next")),
        shared_intermediate=int(text.get("shared_expert_intermediate_size") or 0),
    )
    is_dense = ((i + 1) % every != 0 or i in only_dense for i in range(num_layers))
    return [dense if alone else experts for alone in is_dense]
