"""Small configs of one model family of each kind, which tests ask much. Knows nothing of Pippin.

Where there are experts, every token goes to all of them, each with its weight: to choose some would
be a choice that rounding can tip, inside the model, where no test sees it. every_family.py has the
other families, which tests ask little.
"""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn

from small_models import Config, build_from

VOCAB = 256
NUM_EXPERTS = 4
WINDOW = 32  # of the families with sliding windows: shorter than a chunk and than a tail

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
    "gemma2": _SIZES
    | {
        "model_type": "gemma2",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        "sliding_window": 2048,  # which mlx-lm does not know
        "initializer_range": 0.05,
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
    "gemma3n": _text(
        _SIZES
        | {
            "model_type": "gemma3n",
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "head_dim": 16,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "sliding_window": WINDOW,
            "rope_local_base_freq": 1e4,
            "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.5] + [0.0] * 5,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 8,
            "initializer_range": 0.05,
            "tie_word_embeddings": True,
        }
    ),
    "llama4": _text(
        _SIZES
        | {
            "model_type": "llama4",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": WINDOW,
            "attention_bias": False,
            "use_qk_norm": True,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 1,  # mlx-lm sends a token to one expert
            "num_experts_per_tok": 1,
            "rope_scaling": None,
            "floor_scale": 16,
        }
    ),
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
    "deepseek_v32": _LATENT
    | {"model_type": "deepseek_v32", "index_head_dim": 16, "index_n_heads": 8, "index_topk": 24},
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
# The other one is as qwen3_5 in all that a cache sees.
FAMILIES = tuple(name for name in CONFIGS if name != "qwen3_5_moe")

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
