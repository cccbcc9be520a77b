"""Parts of a config.json that several families write alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pippin.backends.torch.shapes import AttentionShape, LayerShape, ModelShape, RopeShape
from pippin.errors import UnsupportedLayout

Json = dict[str, Any]
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def read_rope(
    text: Json, head_dim: int, max_len: int, *, share: float = 1.0, theta: float = 10000.0
) -> RopeShape:
    """`share` of a head's channels and `theta`: where the config does not say."""
    options: Json = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = str(options.get("rope_type") or options.get("type") or "default")
    if kind == "mrope":  # of text, whose three positions are one
        kind = "default"
    if kind not in ROPE_TYPES:
        raise UnsupportedLayout(f"rope of type {kind} is not served by torch")
    share = options.get("partial_rotary_factor") or text.get("partial_rotary_factor") or share
    theta = options.get("rope_theta") or text.get("rope_theta") or theta
    return RopeShape(int(head_dim * float(share)), float(theta), kind, options, max_len)


def read_attention(
    config: Json, head_dim: int, rope: RopeShape, scale: float | None = None, **options: Any
) -> AttentionShape:
    """`attention_bias` is about all products."""
    heads, biased = int(config["num_attention_heads"]), bool(config.get("attention_bias"))
    return AttentionShape(
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        rope=rope,
        scale=head_dim**-0.5 if scale is None else scale,
        qkv_bias=biased,
        out_bias=biased,
        **options,
    )


def model_of(
    config: Json, layers: Iterable[LayerShape], max_len: int, **options: Any
) -> ModelShape:
    """`options`: what a family writes otherwise."""
    common: Json = {
        "model_type": str(config["model_type"]),
        "prefix": "model.",
        "vocab_size": int(config["vocab_size"]),
        "hidden": int(config["hidden_size"]),
        "max_len": max_len,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "layers": tuple(layers),
    }
    if "eps" not in options:
        common["eps"] = float(config["rms_norm_eps"])
    return ModelShape(**common | options)


def refuse_activation(config: Json, key: str = "hidden_act", served: str = "silu") -> None:
    if (act := config.get(key, served)) != served:
        raise UnsupportedLayout(f"{config['model_type']} with {act} is not served by torch")
