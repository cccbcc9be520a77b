"""Small random checkpoints that transformers itself writes, and the models that it wrote: families
whose weights' names and sizes torch_families.py does not list. Knows nothing of Pippin.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attention_families import ATTENTION_CONFIGS
from every_family import EVERY
from families import CONFIGS
from near_ties import log_softmax
from small_models import Config, draw_values

_LFM2 = CONFIGS["lfm2"]
# Transformers clips time steps of prompts below, where the family's own code does not.
_NEMOTRON_H = CONFIGS["nemotron_h"] | {"head_dim": 16, "time_step_min": 1e-9}
_LATENT = CONFIGS["deepseek_v3"]
_DENSE = {"first_k_dense_replace": 2, "num_hidden_layers": 2}
_GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
_GRANITE = EVERY["granitemoehybrid"] | {"mamba_d_state": 16, "mamba_d_conv": 4}
_BAMBA_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "rms_norm_eps"),
    *("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings"),
    *("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
)
STATE_CONFIGS: dict[str, Config] = {
    "lfm2": _LFM2,
    "lfm2_biases": _LFM2 | {"conv_bias": True, "block_auto_adjust_ff_dim": False},
    "deepseek_v3_dense": _LATENT | _DENSE | {"attention_bias": True},
    "nemotron_h": _NEMOTRON_H | {"hybrid_override_pattern": "M-M*-M*"},
    "nemotron_h_moe": _NEMOTRON_H
    | {"hybrid_override_pattern": "ME*E", "num_experts_per_tok": 2, "routed_scaling_factor": 2.5},
    "lfm2_moe": _LFM2
    | {"model_type": "lfm2_moe", "layer_types": ["conv", "full_attention", "conv"]}
    | {"num_hidden_layers": 3, "num_dense_layers": 1, "num_experts": 4}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "granitemoehybrid": _GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid_dense": _GRANITE
    | {"num_local_experts": 0, "position_embedding_type": "rope"},
    "bamba": {key: _GRANITE[key] for key in _BAMBA_KEYS}
    | {"model_type": "bamba", "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "deepseek_v3": _LATENT | _GROUPS | {"routed_scaling_factor": 2.5},
    "deepseek_v2": _LATENT
    | _GROUPS
    | {"model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "glm4_moe_lite": _LATENT
    | {"model_type": "glm4_moe_lite", "rope_scaling": None, "num_experts_per_tok": 2}
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "qk_rope_head_dim": 16},
}
WRITTEN_CONFIGS = STATE_CONFIGS | ATTENTION_CONFIGS


@cache
def written_model(name: str) -> tuple[Any, Path]:
    """The model, and a directory with its config.json and model.safetensors, which goes when the
    process does."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.for_model(**WRITTEN_CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.requires_grad_(False)
    for key, value in model.state_dict().items():
        rng = np.random.default_rng([0, zlib.crc32(key.encode())])
        drawn = draw_values(key, tuple(value.shape), rng)
        value.copy_(torch.from_numpy(np.asarray(drawn, dtype=np.float32)))
    path = Path(_directory().name, name)
    model.save_pretrained(path)
    return model, path


@cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pippin-transformers-families-")


def score(name: str, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Of each text [tokens, vocab]: log probabilities of what may follow each of its tokens."""
    model, _ = written_model(name)
    lengths = [len(text) for text in texts]
    tokens = torch.zeros(len(texts), max(lengths), dtype=torch.int64)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    with torch.no_grad():  # what is behind a text's end changes nothing before it
        logits = model(tokens, use_cache=False).logits.numpy()
    return [log_softmax(row[:length]) for row, length in zip(logits, lengths, strict=True)]
