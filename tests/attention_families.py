"""Configs of small models whose layers all attend, as transformers reads them. Knows nothing of
Pippin.

Two layers each, or as many as it takes to have one of each kind; windows are shorter than prompts.
"""

from __future__ import annotations

from families import WINDOW
from small_models import Config

_SIZES: Config = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_HEADS = {"head_dim": 32, "initializer_range": 0.05, "tie_word_embeddings": True}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ALTERNATE = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
    "rope_theta": 150_000.0,
}
_SHARED = {"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}

ATTENTION_CONFIGS: dict[str, Config] = {
    "gemma2": _SIZES
    | _HEADS
    | _ALTERNATE
    | {"model_type": "gemma2", "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}
    | {"final_logit_softcapping": 30.0},
    "gemma3": _SIZES
    | _HEADS
    | _ALTERNATE
    | {"model_type": "gemma3_text", "query_pre_attn_scalar": 16},
    "gpt_oss": _SIZES
    | _ALTERNATE
    | {"model_type": "gpt_oss", "head_dim": 16, "rope_parameters": _YARN, "num_local_experts": 4}
    | {"num_experts_per_tok": 2},
    "glm": _SIZES | {"model_type": "glm", "head_dim": 16, "attention_bias": True},
    "glm4": _SIZES | {"model_type": "glm4", "head_dim": 16},
    "glm4_moe": _SIZES
    | _EXPERTS
    | _SHARED
    | {"model_type": "glm4_moe", "head_dim": 16, "use_qk_norm": True, "n_routed_experts": 8}
    | {"n_group": 2, "topk_group": 1, "attention_bias": True},
    "qwen2_moe": _SIZES
    | _EXPERTS
    | {"model_type": "qwen2_moe", "num_experts": 4, "shared_expert_intermediate_size": 48},
    "mixtral": _SIZES
    | {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": WINDOW}
    | {"num_experts_per_tok": 2},
    "phi3": _SIZES | {"model_type": "phi3", "partial_rotary_factor": 0.5},
    "olmo2": _SIZES | {"model_type": "olmo2", "attention_bias": True},
    "olmo3": _SIZES | _ALTERNATE | {"model_type": "olmo3"},
    "granite": _SIZES
    | {"model_type": "granite", "attention_multiplier": 0.1, "embedding_multiplier": 3.0}
    | {"residual_multiplier": 0.5, "logits_scaling": 2.0, "mlp_bias": True},
    "smollm3": _SIZES | {"model_type": "smollm3", "no_rope_layers": [1, 0], "attention_bias": True},
    "cohere": _SIZES
    | {"model_type": "cohere", "use_qk_norm": True, "logit_scale": 0.5, "layer_norm_eps": 1e-5}
    | {"tie_word_embeddings": True},
    "cohere2": _SIZES
    | _ALTERNATE
    | {"model_type": "cohere2", "logit_scale": 0.5, "layer_norm_eps": 1e-5}
    | {"tie_word_embeddings": True},
}
