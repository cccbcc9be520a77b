"""Nemotron-H: blocks of one kind each, Mamba-2, attention without positions, or feed-forward."""

from __future__ import annotations

from typing import Any

from pippin.backends.torch.families.numbers import read_number
from pippin.backends.torch.shapes import (
    NO_ROPE,
    AttentionShape,
    DenseShape,
    ExpertShape,
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
    "E": "moe",
    "moe": "moe",
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
    if "moe" in (_BLOCKS[block] for block in blocks):
        layers["moe"] = LayerShape(None, _experts(config))
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


def _experts(config: dict[str, Any]) -> ExpertShape:
    if config.get("moe_latent_size"):
        raise UnsupportedLayout("nemotron_h with moe_latent_size is not served by torch")
    if config.get("mlp_bias"):
        raise UnsupportedLayout("nemotron_h with experts and mlp_bias is not served by torch")
    return ExpertShape(
        num_experts=int(config["n_routed_experts"]),
        num_chosen=int(config["num_experts_per_tok"]),
        intermediate=int(config["moe_intermediate_size"]),
        normalised=bool(config.get("norm_topk_prob", True)),
        shared_intermediate=int(config["moe_shared_expert_intermediate_size"]),
        shared_gated=False,
        gated=False,
        scoring="sigmoid",
        num_groups=int(config.get("n_group") or 1),
        num_groups_chosen=int(config.get("topk_group") or 1),
        scale=float(config.get("routed_scaling_factor") or 1.0),
    )


def _mamba(config: dict[str, Any], eps: float) -> MambaShape:
    least, most = config.get("time_step_limit") or (0.0, "inf")
    return MambaShape(
        num_heads=int(config["mamba_num_heads"]),
        head_dim=int(config["mamba_head_dim"]),
        num_groups=int(config["n_groups"]),
        state_dim=int(config["ssm_state_size"]),
        num_taps=int(config["conv_kernel"]),
        least_dt=read_number(least),
        most_dt=read_number(most),
        conv_bias=bool(config.get("use_conv_bias", True)),
        bias=bool(config.get("use_bias", config.get("mamba_proj_bias", False))),
        eps=eps,
    )
