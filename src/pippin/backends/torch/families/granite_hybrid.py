"""Granite 4: Mamba-2 and attention in turn, with experts or without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pippin.backends.torch.families.mamba import read_mamba
from pippin.backends.torch.families.rope import read_rope
from pippin.backends.torch.shapes import (
    NO_ROPE,
    AttentionShape,
    DenseShape,
    ExpertShape,
    LayerShape,
    MixerShape,
    MlpShape,
    ModelShape,
)
from pippin.errors import UnsupportedLayout

Json = dict[str, Any]

_NAMES = (
    (".mlp.gate.", ".block_sparse_moe.router.layer."),
    (".mlp.experts.gate_up_proj", ".block_sparse_moe.input_linear.weight"),
    (".mlp.experts.down_proj", ".block_sparse_moe.output_linear.weight"),
    (".mlp.shared_experts.", ".mlp."),
    (".mlp.gate_up_proj", ".shared_mlp.input_linear"),
    (".mlp.down_proj", ".shared_mlp.output_linear"),
)


def read_granite_hybrid(config: Json) -> ModelShape:
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise UnsupportedLayout(f"granitemoehybrid with {act} is not served by torch")
    max_len = int(config.get("max_position_embeddings") or 2048)
    mamba, attention = read_mamba(config), _attention(config, max_len)
    kinds: dict[str, MixerShape] = {
        "mamba": mamba,
        "linear_attention": mamba,
        "attention": attention,
        "full_attention": attention,
    }
    names = config.get("layer_types") or ["mamba"] * int(config["num_hidden_layers"])
    if unknown := set(names) - set(kinds):
        raise UnsupportedLayout(f"layers of type {min(unknown)} are not served by torch")
    mlp = _mlp(config)
    return ModelShape(
        model_type=str(config["model_type"]),
        prefix="model.",
        vocab_size=int(config["vocab_size"]),
        hidden=int(config["hidden_size"]),
        eps=float(config["rms_norm_eps"]),
        max_len=max_len,
        tied=bool(config.get("tie_word_embeddings", False)),
        layers=tuple(LayerShape(kinds[name], mlp) for name in names),
        embed_scale=float(config.get("embedding_multiplier") or 1.0),
        residual_scale=float(config.get("residual_multiplier") or 1.0),
        logit_scale=1.0 / float(config.get("logits_scaling") or 1.0),
        renamed=_NAMES,
    )


def _attention(config: Json, max_len: int) -> AttentionShape:
    heads = int(config["num_attention_heads"])
    head_dim = int(config["hidden_size"]) // heads
    rotates = config.get("position_embedding_type") == "rope"
    biased = bool(config.get("attention_bias"))
    return AttentionShape(
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        # Its own code rotates whole heads, whatever the config says.
        rope=replace(read_rope(config, head_dim, max_len), dim=head_dim) if rotates else NO_ROPE,
        scale=float(config.get("attention_multiplier") or 1.0),
        qkv_bias=biased,
        out_bias=biased,
    )


def _mlp(config: Json) -> MlpShape:
    shared = int(config["shared_intermediate_size"])
    if not (num_experts := int(config.get("num_local_experts") or 0)):
        return DenseShape(shared)
    return ExpertShape(
        num_experts=num_experts,
        num_chosen=int(config["num_experts_per_tok"]),
        intermediate=int(config["intermediate_size"]),
        normalised=True,  # a softmax over the chosen ones
        shared_intermediate=shared,
        shared_gated=False,
    )
