"""Bamba: Mamba-2, and attention in some layers."""

from __future__ import annotations

from typing import Any

from pippin.backends.torch.families.mamba import read_mamba
from pippin.backends.torch.families.rope import read_rope
from pippin.backends.torch.shapes import AttentionShape, DenseShape, LayerShape, ModelShape
from pippin.errors import UnsupportedLayout

_NAMES = (
    ("post_attention_layernorm", "pre_ff_layernorm"),
    ("model.norm", "model.final_layernorm"),
    (".mlp.", ".feed_forward."),
)


def read_bamba(config: dict[str, Any]) -> ModelShape:
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise UnsupportedLayout(f"bamba with {act} is not served by torch")
    max_len = int(config.get("max_position_embeddings") or 262_144)
    attending = set(config.get("attn_layer_indices") or ())
    mlp = DenseShape(int(config["intermediate_size"]), bool(config.get("mlp_bias")))
    mamba, attention = read_mamba(config), _attention(config, max_len)
    return ModelShape(
        model_type="bamba",
        prefix="model.",
        vocab_size=int(config["vocab_size"]),
        hidden=int(config["hidden_size"]),
        eps=float(config["rms_norm_eps"]),
        max_len=max_len,
        tied=bool(config.get("tie_word_embeddings", False)),
        layers=tuple(
            LayerShape(attention if index in attending else mamba, mlp)
            for index in range(int(config["num_hidden_layers"]))
        ),
        renamed=_NAMES,
    )


def _attention(config: dict[str, Any], max_len: int) -> AttentionShape:
    heads = int(config["num_attention_heads"])
    head_dim = int(config["hidden_size"]) // heads
    biased = bool(config.get("attention_bias"))
    return AttentionShape(
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        rope=read_rope(config, head_dim, max_len, share=0.5),
        scale=head_dim**-0.5,
        qkv_bias=biased,
        out_bias=biased,
    )
