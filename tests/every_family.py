"""Small configs of all other model modules of mlx-lm, each a few differences from one set of sizes.

mlx-lm's argument classes take the names that they know and pass over the rest, so all families are
given the same sizes under every name that one of them has for it. Knows nothing of Pippin.
"""

from __future__ import annotations

from families import _EXPERTS, _LATENT, _SIZES, CONFIGS, NUM_EXPERTS, VOCAB, WINDOW, Config

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, EXPERT = 64, 4, 2, 16, 2, 32

# Every name for a size, and a choice that many families share.
_NAMES: Config = (
    _SIZES
    | _EXPERTS
    | {
        # hidden sizes
        **dict.fromkeys(("n_embd", "d_model", "hidden_dim", "model_dim", "dim_model_base"), HIDDEN),
        **dict.fromkeys(("n_inner", "ffn_hidden_size", "ff_intermediate_size"), 96),
        **dict.fromkeys(("dense_intermediate_size", "intermediate_size_mlp"), 96),
        **dict.fromkeys(("num_vocab",), VOCAB),
        **dict.fromkeys(("expert_ffn_hidden_size", "shared_intermediate_size"), EXPERT),
        **dict.fromkeys(("share_expert_dim", "moe_hidden_size"), EXPERT),
        "moe_shared_expert_intermediate_size": EXPERT,
        # heads and layers
        **dict.fromkeys(("n_head", "n_heads", "num_heads", "num_query_heads"), HEADS),
        **dict.fromkeys(("num_kv_heads", "n_kv_heads", "num_attention_groups"), KV_HEADS),
        **dict.fromkeys(
            ("head_dim", "hidden_size_per_head", "kv_channels", "v_head_dim"), HEAD_DIM
        ),
        **dict.fromkeys(("n_layer", "n_layers", "num_layers", "num_transformer_layers"), LAYERS),
        **dict.fromkeys(("n_positions", "n_ctx", "block_size"), 2048),
        # experts: every token goes to all of them
        **dict.fromkeys(("num_local_experts", "n_routed_experts", "moe_num_experts"), NUM_EXPERTS),
        **dict.fromkeys(("moe_topk", "moe_top_k", "moe_k", "num_experts_per_token"), NUM_EXPERTS),
        **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), 1),
        **dict.fromkeys(("n_group", "topk_group", "routed_scaling_factor"), 1),
        **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_freq"), 1),
        **dict.fromkeys(("scoring_func", "score_function"), "sigmoid"),
        "topk_method": "noaux_tc",
        "mlp_only_layers": [],
        # attention
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
        **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
        "qk_nope_head_dim": 16,
        **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size"), WINDOW),
        "sliding_window_pattern": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "partial_rotary_factor": 0.5,
        # norms, biases, activations
        **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon"), 1e-5),
        **dict.fromkeys(("norm_eps", "norm_epsilon", "post_norm_eps"), 1e-5),
        **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "bias", "conv_bias"), False),
        **dict.fromkeys(("use_qkv_bias", "qk_norm", "use_qk_norm", "use_conv_bias"), True),
        "hidden_act": "silu",
        # recurrent layers
        **dict.fromkeys(("conv_kernel", "mamba_d_conv", "conv1d_width"), 4),
        **dict.fromkeys(("state_size", "mamba_d_state"), 16),
        **dict.fromkeys(("conv_L_cache", "conv_window"), 3),
        **dict.fromkeys(("layer_group_size", "group_norm_size"), 2),
    }
)

_TEXT = {"model_type": "llama", "tie_word_embeddings": False}
_MULTIPLIERS = {
    "logits_scaling": 0.5,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.8,
}
_LONGCAT = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "zero_expert_num": 1,
    "moe_topk": NUM_EXPERTS + 1,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_ROPES = {name: {"rope_theta": 1e4} for name in ("sliding_attention", "full_attention")}
_INDEX = {"index_head_dim": 16, "index_n_heads": 8, "index_topk": 24}

# What a family has beside those, or differently.
_NO_DIFFERENCES = (
    *("Klear", "afmoe", "bailing_hybrid", "bailing_moe", "bailing_moe_linear", "bailing_moe_v3"),
    *("cohere", "cohere2", "deepseek", "dots1", "ernie4_5", "ernie4_5_moe", "exaone", "gemma"),
    *("glm", "glm4", "gpt2", "gptj", "helium", "hunyuan_v1_dense", "internlm2", "internlm3"),
    *("iquestloopcoder", "laguna", "lille-130m", "mimo", "minimax", "mixtral", "muse_glimmer"),
    *("nanbeige", "nanochat", "nemotron", "olmo2", "olmo3", "olmoe", "phi", "phi3", "phimoe"),
    *("phixtral", "plamo2", "plamo3", "qwen", "qwen2", "qwen2_moe", "qwen3_moe", "seed_oss"),
    *("smollm3", "solar_open", "stablelm", "starcoder2", "step3p5", "talkie", "telechat3"),
    "youtu_llm",
)
_DIFFERENCES: dict[str, Config] = {name: Config() for name in _NO_DIFFERENCES} | {
    "afm7": {"num_layers": 4, "num_kv_reuse_layers": 2, "hidden_dim_scale_factor": 1.5},
    "apertus": {"post_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0], "conv_window": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": EXPERT, "moe_num_experts": 4, "moe_top_k": 4},
    },
    "deepseek_v2": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        "topk_method": "greedy",
    },
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": None},
    "exaone_moe": {"is_moe_layer": [False, True]},
    "gear": {"num_hidden_layers": 3, "layer_types": ["conv_mixer", *_NAMES["layer_types"]]},
    "gemma3": {"text_config": CONFIGS["gemma3"] | {"model_type": "gemma3_text"}},
    "gemma4": {"text_config": CONFIGS["gemma4"]},
    "glm4_moe": {"rope_scaling": None},
    "glm4_moe_lite": {"num_key_value_heads": HEADS},
    "glm_moe_dsa": _INDEX | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "granite": _MULTIPLIERS,
    "granitemoe": _MULTIPLIERS,
    "granitemoehybrid": _MULTIPLIERS
    | {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": HEAD_DIM,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
        "position_embedding_type": "nope",
    },
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 2.0},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_expand": 2,
    },
    "kimi_k25": {"text_config": _LATENT},
    "kimi_k3": {
        "text_config": CONFIGS["kimi_linear"] | {"hidden_act": "situ", "activation_situ_beta": 1.5}
    },
    "kimi_vl": {"text_config": _LATENT},
    "lfm2-vl": {"text_config": CONFIGS["lfm2"]},
    "lfm2_moe": {"full_attn_idxs": [1], "use_expert_bias": True, "layer_types": None},
    "llama4_text": {"no_rope_layers": [1, 0]},
    "longcat_flash": _LONGCAT,
    "mamba": {"time_step_rank": 4},
    "mellum": {"rope_parameters": _ROPES},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_rope_theta": 1e4,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": KV_HEADS,
        "swa_head_dim": HEAD_DIM,
        "swa_v_head_dim": HEAD_DIM,
    },
    "minicpm": {"scale_depth": 1.4, "scale_emb": 2},
    "minicpm3": {
        "scale_depth": 1.4,
        "scale_emb": 2,
        "rope_scaling": {
            "original_max_position_embeddings": 2048,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
        },
    },
    "minimax_m3_vl": {
        "text_config": _NAMES
        | {
            "layer_types": ["full_attention", "sparse"],
            "index_n_heads": KV_HEADS,
            "index_head_dim": 16,
            "index_block_size": 8,
            "index_topk_blocks": 4,
            "moe_layer_freq": [0, 1],
        }
    },
    "ministral3": {
        "rope_parameters": {
            "rope_theta": 1e4,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 32,
        }
    },
    "mistral3": {"text_config": _SIZES | _TEXT},
    "mistral4": {
        "rope_parameters": {
            "rope_theta": 1e4,
            "rope_type": "default",
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 32,
        }
    },
    "nemotron-nas": {
        "num_hidden_layers": 3,
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.0}},
        ],
    },
    "openelm": {
        "num_query_heads": [4, 4],
        "num_kv_heads": [2, 2],
        "ffn_dim_divisor": 16,
        "ffn_multipliers": [1.0, 2.0],
    },
    "pixtral": {"text_config": _SIZES | _TEXT},
    "plamo": {"n_shared_head": 2},
    "qwen2_vl": {"text_config": _SIZES | {"model_type": "qwen2"}},
    "qwen3_5_moe": CONFIGS["qwen3_5_moe"],
    "qwen3_vl": {"text_config": CONFIGS["qwen3"]},
    "qwen3_vl_moe": {"text_config": _NAMES | {"model_type": "qwen3_moe"}},
    "recurrent_gemma": {
        "logits_soft_cap": 30.0,
        "num_hidden_layers": 3,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": dict.fromkeys(
        ("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim"), 16
    ),
    "spark2_5": {"rope_parameters": _ROPES, "hidden_act": "gelu"},
}

_WITH_METAL_KERNELS: dict[str, Config] = {
    "bitnet": {},
    "muse_spark": {
        "text_config": _NAMES
        | {
            "rope_parameters": {"rope_theta": 1e4},
            "layer_rope_theta": [1e4, 0],
            "final_logit_softcapping": 20.0,
            "output_multiplier": 0.5,
            "num_shared_experts": 0,
        }
    },
}


def _whole(differences: dict[str, Config]) -> dict[str, Config]:
    return {name: _NAMES | {"model_type": name} | own for name, own in differences.items()}


EVERY = _whole(_DIFFERENCES)
METAL_ONLY = _whole(_WITH_METAL_KERNELS)
# Packed weights of qwen3_5, which no random numbers make.
UNTRIED = {"prism_hadamard_qwen35"}
