"""Nemotron-H: blocks of one kind each, Mamba-2, attention without positions, or feed-forward."""

from __future__ import annotations

import math
from typing import Any

from pippin.backends.torch.shapes import (
    NO_ROPE,
    AttentionShape,
    DenseShape,
    LayerShape,
    MambaShape,
    ModelShape,
)
from pippin.errors import UnsupportedLayout

_NAMES = (
    ("model.embed_tokens", "backbone.embeddings"),
    ("model.norm", "backbone.norm_f"),
    ("model.", "backbone."),
    ("input_layernorm", "norm"),
    ("post_attention_layernorm", "norm"),
    (".self_attn.", ".mixer."),
    (".mamba.", ".mixer."),
    (".mlp.", ".mixer."),
)
_BLOCKS = {
    "M": "mamba",
    "linear_attention": "mamba",
    "mamba": "mamba",
    "*": "attention",
    "full_attention": "attention",
    "attention": "attention",
    "-": "mlp",
    "mlp": "mlp",
}


def read_nemotron_h(config: dict[str, Any]) -> ModelShape:
    blocks = config.get("layers_block_type") or config["hybrid_override_pattern"]
    if unknown := set(blocks) - set(_BLOCKS):
        raise UnsupportedLayout(f"nemotron_h with blocks {min(unknown)} is not served by torch")
    if (act := config.get("mlp_hidden_act", "relu2")) != "relu2":
        raise UnsupportedLayout(f"nemotron_h with {act} is not served by torch")
    eps = float(config.get("layer_norm_epsilon") or 1e-5)
    biased = bool(config.get("mlp_bias"))
    mlp = DenseShape(int(config["intermediate_size"]), biased, gated=False)
    layers = {
        "mamba": LayerShape(_mamba(config, eps), None),
        "attention": LayerShape(_attention(config), None),
        "mlp": LayerShape(None, mlp),
    }
    return ModelShape(
        model_type=str(config["model_type"]),
        prefix="model.",
        vocab_size=int(config["vocab_size"]),
        hidden=int(config["hidden_size"]),
        eps=eps,
        max_len=int(config.get("max_position_embeddings") or 4096),
        tied=bool(config.get("tie_word_embeddings", False)),
        layers=tuple(layers[_BLOCKS[block]] for block in blocks),
        renamed=_NAMES,
    )


def _attention(config: dict[str, Any]) -> AttentionShape:
    heads = int(config["num_attention_heads"])
    biased = bool(config.get("attention_bias"))
    head_dim = int(config.get("head_dim") or config.get("attention_head_dim") or 128)
    return AttentionShape(
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        rope=NO_ROPE,
        scale=head_dim**-0.5,
        qkv_bias=biased,
        out_bias=biased,
    )


def _mamba(config: dict[str, Any], eps: float) -> MambaShape:
    least, most = config.get("time_step_limit") or (0.0, math.inf)
    return MambaShape(
        num_heads=int(config["mamba_num_heads"]),
        head_dim=int(config["mamba_head_dim"]),
        num_groups=int(config["n_groups"]),
        state_dim=int(config["ssm_state_size"]),
        num_taps=int(config["conv_kernel"]),
        least_dt=_number(least),
        most_dt=_number(most),
        conv_bias=bool(config.get("use_conv_bias", True)),
        bias=bool(config.get("use_bias", config.get("mamba_proj_bias", False))),
        eps=eps,
    )


def _number(value: Any) -> float:
    """Transformers writes infinity as an object."""
    return float(value["__float__"] if isinstance(value, dict) else value)
