"""LFM2 and LFM2-MoE: short convolutions beside attention."""

from __future__ import annotations

from typing import Any

from pippin.backends.torch.families.rope import read_rope
from pippin.backends.torch.shapes import (
    AttentionShape,
    ConvShape,
    DenseShape,
    ExpertShape,
    LayerShape,
    MixerShape,
    MlpShape,
    ModelShape,
)
from pippin.errors import UnsupportedLayout

_NAMES = (
    ("input_layernorm", "operator_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("model.norm", "model.embedding_norm"),
    ("q_norm", "q_layernorm"),
    ("k_norm", "k_layernorm"),
    ("o_proj", "out_proj"),
    (".mlp.gate.e_score_correction_bias", ".mlp.expert_bias"),
    (".mlp.", ".feed_forward."),
    (".gate_proj", ".w1"),
    (".up_proj", ".w3"),
    (".down_proj", ".w2"),
)


def read_lfm2(config: dict[str, Any]) -> ModelShape:
    hidden, num_layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    head_dim = hidden // heads
    max_len = int(config.get("max_position_embeddings") or 128_000)
    attention = AttentionShape(
        num_heads=heads,
        num_kv_heads=int(config["num_key_value_heads"]),
        head_dim=head_dim,
        rope=read_rope(config, head_dim, max_len, theta=1e6),
        scale=head_dim**-0.5,
        qk_norm="head",
    )
    conv = ConvShape(hidden, int(config["conv_L_cache"]), bool(config.get("conv_bias")))
    kinds: dict[str, MixerShape] = {"full_attention": attention, "conv": conv}
    names = config.get("layer_types") or _layer_types(config, num_layers)
    if unknown := set(names) - set(kinds):
        raise UnsupportedLayout(f"layers of type {min(unknown)} are not served by torch")
    return ModelShape(
        model_type=str(config["model_type"]),
        prefix="model.",
        vocab_size=int(config["vocab_size"]),
        hidden=hidden,
        eps=float(config.get("norm_eps") or 1e-5),
        max_len=max_len,
        tied=bool(config.get("tie_embedding", config.get("tie_word_embeddings", True))),
        layers=tuple(map(LayerShape, (kinds[name] for name in names), _mlps(config, num_layers))),
        renamed=_NAMES,
    )


def _mlps(config: dict[str, Any], num_layers: int) -> list[MlpShape]:
    if config["model_type"] == "lfm2":
        return [DenseShape(_intermediate(config))] * num_layers
    if not config.get("use_expert_bias", True):
        raise UnsupportedLayout("lfm2_moe without use_expert_bias is not served by torch")
    num_dense = int(config["num_dense_layers"])
    experts = ExpertShape(
        num_experts=int(config["num_experts"]),
        num_chosen=int(config["num_experts_per_tok"]),
        intermediate=int(config["moe_intermediate_size"]),
        normalised=bool(config.get("norm_topk_prob", True)),
        scoring="sigmoid",
        scale=float(config.get("routed_scaling_factor") or 1.0),
    )
    dense: MlpShape = DenseShape(int(config["intermediate_size"]))
    return [dense] * num_dense + [experts] * (num_layers - num_dense)


def _layer_types(config: dict[str, Any], num_layers: int) -> list[str]:
    attending = config.get("full_attn_idxs")
    full = range(num_layers) if attending is None else attending
    return ["full_attention" if index in full else "conv" for index in range(num_layers)]


def _intermediate(config: dict[str, Any]) -> int:
    """As its own code makes it of what the config says."""
    size = int(config.get("block_ff_dim") or config["intermediate_size"])
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    multiple = int(config.get("block_multiple_of", 256))
    size = int(float(config.get("block_ffn_dim_multiplier", 1.0)) * size)
    return -(-size // multiple) * multiple
