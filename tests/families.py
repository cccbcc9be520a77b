"""Small random checkpoints of many model families, built in memory. Knows nothing of Pippin.

Weights depend only on the seed and the parameter's name, so two builds are two equal, independent
models: one to serve, one to stay plain mlx-lm. Their scales are chosen so that what a model says
next depends on all it has read, and greedy choices are clear. Where there are experts, every token
goes to all of them, each with its weight: to choose some would be a choice that rounding can tip,
inside the model, where no test sees it.
"""

from __future__ import annotations

import importlib
import math
import zlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path

VOCAB = 256
NUM_EXPERTS = 4
WINDOW = 32  # of the families with sliding windows: shorter than a chunk and than a tail

Config = dict[str, Any]

_SIZES: Config = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_LINEAR: Config = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "head_dim": 16,
    "num_hidden_layers": 3,
}
_EXPERTS: Config = {
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": NUM_EXPERTS,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
}
_QWEN3: Config = _SIZES | {"model_type": "qwen3", "head_dim": 16}
_QWEN3_5: Config = _SIZES | _LINEAR | {"model_type": "qwen3_5"}


def _text(config: Config) -> Config:
    """As a checkpoint that also sees images nests it."""
    return {"model_type": config["model_type"], "text_config": config}


_LATENT: Config = _SIZES | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": NUM_EXPERTS,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

CONFIGS: dict[str, Config] = {
    "qwen3_5": _text(
        _QWEN3_5
        | {"rope_parameters": {"type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
    ),
    "qwen3_5_moe": _text(_QWEN3_5 | _EXPERTS | {"model_type": "qwen3_5_moe"}),
    "qwen3_next": _SIZES
    | _LINEAR
    | _EXPERTS
    | {"model_type": "qwen3_next", "mlp_only_layers": [0], "partial_rotary_factor": 0.25},
    "qwen3": _QWEN3,
    "qwen3-4bit": _QWEN3,
    "llama": _SIZES
    | {
        "model_type": "llama",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "gpt_oss": _SIZES
    | {
        "model_type": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_EXPERTS,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 128,
        },
    },
    "gemma3": _SIZES
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    "gemma4": _SIZES
    | {
        "model_type": "gemma4_text",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": True,
    },
    "mamba2": _SIZES
    | {
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.0, math.inf],
        "time_step_rank": "auto",
    },
    "falcon_h1": _SIZES
    | {
        "model_type": "falcon_h1",
        "head_dim": 16,
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 128,
        "mamba_d_state": 16,
        "mamba_n_groups": 2,
        "mamba_n_heads": 8,
        "mamba_rms_norm": True,
    },
    "nemotron_h": _SIZES
    | {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": list("M-M*E"),
        "attention_bias": False,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": NUM_EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": NUM_EXPERTS,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    },
    "lfm2": _SIZES
    | {
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": [1, 3],
    },
    "granitemoehybrid": _SIZES
    | {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "attention_bias": False,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.8,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_EXPERTS,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
        "position_embedding_type": "nope",
    },
    "deepseek_v3": _LATENT
    | {
        "model_type": "deepseek_v3",
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    "glm4_moe_lite": _LATENT
    | {
        "model_type": "glm4_moe_lite",
        "partial_rotary_factor": 1.0,
    },
    "kimi_linear": _SIZES
    | {
        "model_type": "kimi_linear",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 2048,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_token": NUM_EXPERTS,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "mla_use_nope": True,
    },
    "olmo_hybrid": _SIZES
    | _LINEAR
    | {
        "model_type": "olmo_hybrid",
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
}
FAMILIES = tuple(CONFIGS)

# Its rotation depends on the length of the longest row, so rows cannot share a forward.
LLAMA_DYNAMIC: Config = _SIZES | {
    "model_type": "llama",
    "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
}


def build(family: str, *, seed: int = 0) -> tuple[nn.Module, Config]:
    """A new model of a family and its config.json; the same weights every time."""
    config = CONFIGS[family]
    model = build_from(config, seed=seed)
    if family.endswith("-4bit"):
        nn.quantize(model, group_size=32, bits=4)
        mx.eval(model.parameters())
    return model, config


def build_from(config: Config, *, seed: int = 0) -> nn.Module:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(_copy(config)))

    def draw(path: str, array: mx.array) -> mx.array:
        rng = np.random.default_rng([seed, zlib.crc32(path.encode())])
        return mx.array(_draw(path, array.shape, rng).astype(np.float32))

    model.update(tree_map_with_path(draw, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def _draw(path: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Values by the parameter's role, which its name and shape tell."""
    name = path.split(".")[-1]
    noise = rng.standard_normal(shape)
    if name == "A_log":  # memories of a few tokens to a few hundred
        return rng.uniform(-5.0, 0.0, shape)
    if name == "dt_bias":
        return rng.uniform(-2.0, 1.0, shape)
    if name == "D" or (name == "weight" and len(shape) == 1):
        return 1.0 + 0.1 * noise
    if len(shape) == 1:  # biases, sinks
        return 0.3 * noise
    if "embed" in path and len(shape) == 2:
        return noise
    if "conv" in path and len(shape) == 3 and shape[-1] == 1:
        return noise / math.sqrt(shape[1])
    gain = 4.0 if "lm_head" in path else 1.5
    return gain * noise / math.sqrt(shape[-1])


def _copy(value: Any) -> Any:
    """mlx-lm's argument classes write into nested dictionaries."""
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, list) else value
