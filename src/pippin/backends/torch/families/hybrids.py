"""Hybrids that no line of `table.py` describes: Bamba, Granite 4, LFM2, Nemotron-H."""

from __future__ import annotations

from dataclasses import replace

from pippin.backends.torch.families.parts import (
    Json,
    model_of,
    read_attention,
    read_rope,
    refuse_activation,
)
from pippin.backends.torch.shapes import (
    NO_ROPE,
    AttentionShape,
    ConvShape,
    DenseShape,
    ExpertShape,
    LayerShape,
    MambaShape,
    MixerShape,
    MlpShape,
    ModelShape,
)
from pippin.errors import UnsupportedLayout

_BAMBA_NAMES = (
    ("post_attention_layernorm", "pre_ff_layernorm"),
    ("model.norm", "model.final_layernorm"),
    (".mlp.", ".feed_forward."),
)
_GRANITE_NAMES = (
    (".mlp.gate.", ".block_sparse_moe.router.layer."),
    (".mlp.experts.gate_up_proj", ".block_sparse_moe.input_linear.weight"),
    (".mlp.experts.down_proj", ".block_sparse_moe.output_linear.weight"),
    (".mlp.shared_experts.", ".mlp."),
    (".mlp.gate_up_proj", ".shared_mlp.input_linear"),
    (".mlp.down_proj", ".shared_mlp.output_linear"),
)
_LFM2_NAMES = (
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
_NEMOTRON_NAMES = (
    ("model.embed_tokens", "backbone.embeddings"),
    ("model.norm", "backbone.norm_f"),
    ("model.", "backbone."),
    ("input_layernorm", "norm"),
    ("post_attention_layernorm", "norm"),
    (".self_attn.", ".mixer."),
    (".mamba.", ".mixer."),
    (".mlp.", ".mixer."),
)
_NEMOTRON_BLOCKS = {
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


def read_bamba(config: Json) -> ModelShape:
    refuse_activation(config)
    max_len = int(config.get("max_position_embeddings") or 262_144)
    attending = set(config.get("attn_layer_indices") or ())
    mlp = DenseShape(int(config["intermediate_size"]), bool(config.get("mlp_bias")))
    head_dim = int(config["hidden_size"]) // int(config["num_attention_heads"])
    attention = read_attention(config, head_dim, read_rope(config, head_dim, max_len, share=0.5))
    mamba = _read_mamba(config)
    layers = (
        LayerShape(attention if index in attending else mamba, mlp)
        for index in range(int(config["num_hidden_layers"]))
    )
    return model_of(config, layers, max_len, renamed=_BAMBA_NAMES)


def read_granite_hybrid(config: Json) -> ModelShape:
    refuse_activation(config)
    max_len = int(config.get("max_position_embeddings") or 2048)
    mamba, attention = _read_mamba(config), _granite_attention(config, max_len)
    kinds: dict[str, MixerShape] = {
        "mamba": mamba,
        "linear_attention": mamba,
        "attention": attention,
        "full_attention": attention,
    }
    names = config.get("layer_types") or ["mamba"] * int(config["num_hidden_layers"])
    _refuse_layers(names, kinds)
    mlp = _granite_mlp(config)
    return model_of(
        config,
        (LayerShape(kinds[name], mlp) for name in names),
        max_len,
        embed_scale=float(config.get("embedding_multiplier") or 1.0),
        residual_scale=float(config.get("residual_multiplier") or 1.0),
        logit_scale=1.0 / float(config.get("logits_scaling") or 1.0),
        renamed=_GRANITE_NAMES,
    )


def _granite_attention(config: Json, max_len: int) -> AttentionShape:
    head_dim = int(config["hidden_size"]) // int(config["num_attention_heads"])
    rope = NO_ROPE
    if config.get("position_embedding_type") == "rope":
        # Its own code rotates whole heads, whatever the config says.
        rope = replace(read_rope(config, head_dim, max_len), dim=head_dim)
    return read_attention(
        config, head_dim, rope, scale=float(config.get("attention_multiplier") or 1.0)
    )


def _granite_mlp(config: Json) -> MlpShape:
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


def _read_mamba(config: Json) -> MambaShape:
    """As Granite 4's and Bamba's configs have it."""
    inner = int(config.get("mamba_expand") or 2) * int(config["hidden_size"])
    heads = int(config["mamba_n_heads"])
    least, most = _time_steps(config)
    return MambaShape(
        num_heads=heads,
        head_dim=inner // heads,
        num_groups=int(config["mamba_n_groups"]),
        state_dim=int(config["mamba_d_state"]),
        num_taps=int(config["mamba_d_conv"]),
        least_dt=least,
        most_dt=most,
        conv_bias=bool(config.get("mamba_conv_bias", True)),
        bias=bool(config.get("mamba_proj_bias")),
        eps=float(config["rms_norm_eps"]),
    )


def _time_steps(config: Json) -> list[float]:
    """The least and the most. Transformers writes infinity as an object."""
    limits = config.get("time_step_limit") or (0.0, "inf")
    return [float(each["__float__"] if isinstance(each, dict) else each) for each in limits]


def _refuse_layers(names: list[str], kinds: dict[str, MixerShape]) -> None:
    if unknown := set(names) - set(kinds):
        raise UnsupportedLayout(f"layers of type {min(unknown)} are not served by torch")


def read_lfm2(config: Json) -> ModelShape:
    hidden, num_layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    head_dim = hidden // int(config["num_attention_heads"])
    max_len = int(config.get("max_position_embeddings") or 128_000)
    rope = read_rope(config, head_dim, max_len, theta=1e6)
    plain = config | {"attention_bias": False}
    kinds: dict[str, MixerShape] = {
        "full_attention": read_attention(plain, head_dim, rope, qk_norm="head"),
        "conv": ConvShape(hidden, int(config["conv_L_cache"]), bool(config.get("conv_bias"))),
    }
    attending = config.get("full_attn_idxs")
    full = range(num_layers) if attending is None else attending
    names = config.get("layer_types") or [
        "full_attention" if index in full else "conv" for index in range(num_layers)
    ]
    _refuse_layers(names, kinds)
    mixers = (kinds[name] for name in names)
    return model_of(
        config,
        map(LayerShape, mixers, _lfm2_mlps(config, num_layers)),
        max_len,
        eps=float(config.get("norm_eps") or 1e-5),
        tied=bool(config.get("tie_embedding", config.get("tie_word_embeddings", True))),
        renamed=_LFM2_NAMES,
    )


def _lfm2_mlps(config: Json, num_layers: int) -> list[MlpShape]:
    if config["model_type"] == "lfm2":
        return [DenseShape(_lfm2_intermediate(config))] * num_layers
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


def _lfm2_intermediate(config: Json) -> int:
    """As its own code makes it of what the config says."""
    size = int(config.get("block_ff_dim") or config["intermediate_size"])
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    multiple = int(config.get("block_multiple_of", 256))
    size = int(float(config.get("block_ffn_dim_multiplier", 1.0)) * size)
    return -(-size // multiple) * multiple


def read_nemotron_h(config: Json) -> ModelShape:
    """Blocks of one kind each: Mamba-2, attention without positions, or feed-forward."""
    blocks = config.get("layers_block_type") or config["hybrid_override_pattern"]
    if unknown := set(blocks) - set(_NEMOTRON_BLOCKS):
        raise UnsupportedLayout(f"nemotron_h with blocks {min(unknown)} is not served by torch")
    refuse_activation(config, "mlp_hidden_act", "relu2")
    eps = float(config.get("layer_norm_epsilon") or 1e-5)
    head_dim = int(config.get("head_dim") or config.get("attention_head_dim") or 128)
    mlp = DenseShape(int(config["intermediate_size"]), bool(config.get("mlp_bias")), gated=False)
    layers = {
        "mamba": LayerShape(_nemotron_mamba(config, eps), None),
        "attention": LayerShape(read_attention(config, head_dim, NO_ROPE), None),
        "mlp": LayerShape(None, mlp),
    }
    if "moe" in (_NEMOTRON_BLOCKS[block] for block in blocks):
        layers["moe"] = LayerShape(None, _nemotron_experts(config))
    return model_of(
        config,
        (layers[_NEMOTRON_BLOCKS[block]] for block in blocks),
        int(config.get("max_position_embeddings") or 4096),
        eps=eps,
        renamed=_NEMOTRON_NAMES,
    )


def _nemotron_experts(config: Json) -> ExpertShape:
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


def _nemotron_mamba(config: Json, eps: float) -> MambaShape:
    least, most = _time_steps(config)
    return MambaShape(
        num_heads=int(config["mamba_num_heads"]),
        head_dim=int(config["mamba_head_dim"]),
        num_groups=int(config["n_groups"]),
        state_dim=int(config["ssm_state_size"]),
        num_taps=int(config["conv_kernel"]),
        least_dt=least,
        most_dt=most,
        conv_bias=bool(config.get("use_conv_bias", True)),
        bias=bool(config.get("use_bias", config.get("mamba_proj_bias", False))),
        eps=eps,
    )
