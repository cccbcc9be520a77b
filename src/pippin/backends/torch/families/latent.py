"""Latent attention: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash."""

from __future__ import annotations

import math
from dataclasses import replace

from pippin.backends.torch.families.parts import Json, model_of, read_rope, refuse_activation
from pippin.backends.torch.shapes import (
    DenseShape,
    ExpertShape,
    LatentShape,
    LayerShape,
    MlpShape,
    ModelShape,
    RopeShape,
)
from pippin.errors import UnsupportedLayout

# Layers without experts, where a config does not say.
_DENSE_LAYERS = {"deepseek_v2": 0, "deepseek_v3": 3, "kimi_k2": 1, "glm4_moe_lite": 1}


def read_latent(config: Json) -> ModelShape:
    model_type = str(config["model_type"])
    refuse_activation(config)
    max_len = int(config.get("max_position_embeddings") or 4096)
    mixer = _mixer(config, max_len)
    layers = (LayerShape(mixer, mlp) for mlp in _mlps(config, model_type))
    return model_of(config, layers, max_len)


def _mixer(config: Json, max_len: int) -> LatentShape:
    plain_dim, rope_dim = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
    rope = replace(read_rope(config, rope_dim, max_len), dim=rope_dim)
    return LatentShape(
        num_heads=int(config["num_attention_heads"]),
        rank=int(config["kv_lora_rank"]),
        rope=rope,
        plain_dim=plain_dim,
        value_dim=int(config["v_head_dim"]),
        query_rank=int(config.get("q_lora_rank") or 0),
        scale=(plain_dim + rope_dim) ** -0.5 * _stretch(rope) ** 2,
        bias=bool(config.get("attention_bias")),
        rope_pairs=bool(config.get("rope_interleave", True)),
    )


def _stretch(rope: RopeShape) -> float:
    """What YaRN multiplies queries and keys with beside their rotation, as DeepSeek has it."""
    weight, factor = rope.options.get("mscale_all_dim"), float(rope.options.get("factor") or 1.0)
    if rope.kind == "default" or not weight or factor <= 1.0:
        return 1.0
    return 0.1 * float(weight) * math.log(factor) + 1.0


def _mlps(config: Json, model_type: str) -> list[MlpShape]:
    num_layers = int(config["num_hidden_layers"])
    dense = DenseShape(int(config["intermediate_size"]))
    if not config.get("n_routed_experts"):
        return [dense] * num_layers
    if int(config.get("moe_layer_freq") or 1) != 1:
        raise UnsupportedLayout(f"{model_type} with moe_layer_freq above 1 is not served by torch")
    experts = _experts(config, model_type)
    first = int(config.get("first_k_dense_replace", _DENSE_LAYERS[model_type]))
    names = ["dense"] * first + ["sparse"] * (num_layers - first)
    kinds: dict[str, MlpShape] = {"dense": dense, "sparse": experts}
    return [kinds[name] for name in (config.get("mlp_layer_types") or names)[:num_layers]]


def _experts(config: Json, model_type: str) -> ExpertShape:
    intermediate = int(config["moe_intermediate_size"])
    num_groups, num_chosen = int(config.get("n_group") or 1), int(config.get("topk_group") or 1)
    is_v2 = model_type == "deepseek_v2"
    if is_v2 and config.get("norm_topk_prob"):
        raise UnsupportedLayout("deepseek_v2 with norm_topk_prob is not served by torch")
    if is_v2 and config.get("topk_method", "greedy") == "greedy":
        num_groups = num_chosen = 1
    return ExpertShape(
        num_experts=int(config["n_routed_experts"]),
        num_chosen=int(config["num_experts_per_tok"]),
        intermediate=intermediate,
        normalised=not is_v2 and bool(config.get("norm_topk_prob", True)),
        shared_intermediate=intermediate * int(config.get("n_shared_experts") or 0),
        shared_gated=False,
        scoring="softmax" if is_v2 else "sigmoid",
        num_groups=num_groups,
        num_groups_chosen=num_chosen,
        scale=float(config.get("routed_scaling_factor") or 1.0),
        group_best=1 if is_v2 else 2,
    )
