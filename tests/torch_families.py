"""Small random checkpoints of the families that the torch backend serves, as Hugging Face stores
them: one directory each, which mlx-lm and transformers read as well. Knows nothing of Pippin.

Configs and scales are those of families.py; weights depend on the seed and on their names alone.
"""

from __future__ import annotations

import json
import re
import tempfile
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from families import CONFIGS, WINDOW
from small_models import Config, draw_values

_QWEN3 = CONFIGS["qwen3"]
_LLAMA = CONFIGS["llama"]
_EXPERTS = {key: CONFIGS["qwen3_next"][key] for key in ("num_experts", "num_experts_per_tok")}
TORCH_CONFIGS: dict[str, Config] = {
    **{name: CONFIGS[name] for name in ("llama", "qwen3", "qwen3_5", "qwen3_next")},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "text_config": CONFIGS["qwen3_5_moe"]["text_config"]
        | {"rope_parameters": CONFIGS["qwen3_5"]["text_config"]["rope_parameters"]},
    },
    # Windows: in all layers, in the later ones, and in turn as mlx-lm reads it.
    "mistral": _LLAMA | {"model_type": "mistral", "sliding_window": WINDOW},
    "qwen3_windows": _QWEN3
    | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "llama_windows": _LLAMA
    | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen2": _QWEN3 | {"model_type": "qwen2", "tie_word_embeddings": True},
    # With every bias that a config of the family can ask for.
    "llama_biases": _LLAMA | {"attention_bias": True, "mlp_bias": True},
    "qwen3_biases": _QWEN3 | {"attention_bias": True},
    "qwen3_next_biases": CONFIGS["qwen3_next"] | {"attention_bias": True},
    "qwen3_moe": _QWEN3
    | _EXPERTS
    | {"model_type": "qwen3_moe", "moe_intermediate_size": 32, "mlp_only_layers": []}
    | {"norm_topk_prob": True, "decoder_sparse_step": 1},
}
HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
_HEAD = {"mtp_num_hidden_layers": 1}
MTP_CONFIGS: dict[str, Config] = {
    "qwen3_5_mtp": TORCH_CONFIGS["qwen3_5"]
    | {"text_config": TORCH_CONFIGS["qwen3_5"]["text_config"] | _HEAD},
    "qwen3_next_mtp": TORCH_CONFIGS["qwen3_next"] | _HEAD,
}

DRAFT_CONFIGS: dict[str, Config] = {  # models whose heads score fewer or more ids than others'
    f"llama_{name}_vocab": _LLAMA | {"vocab_size": _LLAMA["vocab_size"] + more}
    for name, more in (("small", -9), ("large", 9))
}


@cache
def checkpoint(name: str) -> Path:
    """A directory with config.json and model.safetensors; it goes when the process does."""
    path = Path(_directory().name, name)
    path.mkdir()
    config = (TORCH_CONFIGS | MTP_CONFIGS | DRAFT_CONFIGS)[name]
    (path / "config.json").write_text(json.dumps(_complete(config)))
    save_file(weights(config), path / "model.safetensors", {"format": "pt"})
    return path


@cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pippin-torch-families-")


def _complete(config: Config) -> Config:
    """What mlx-lm's classes default and transformers' do differently."""
    if "text_config" in config:
        text = config["text_config"]
        return config | {"text_config": text | {"model_type": f"{text['model_type']}_text"}}
    return config


def weights(config: Config) -> dict[str, torch.Tensor]:
    text = config.get("text_config", config)
    prefix = "model.language_model." if "text_config" in config else "model."
    found = {}
    for name, shape in _shapes(text, prefix):
        rng = np.random.default_rng([0, zlib.crc32(name.encode())])
        values = draw_values(name, shape, rng)
        zero_centred = text["model_type"] in HYBRIDS and "linear_attn.norm" not in name
        if zero_centred and re.search(r"norm(_embedding|_hidden)?\.weight$", name):
            values = values - 1.0
        found[name] = torch.from_numpy(values.astype(np.float32))
    return found


def _shapes(text: dict[str, Any], prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    yield f"{prefix}embed_tokens.weight", (vocab, hidden)
    yield f"{prefix}norm.weight", (hidden,)
    if not text["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)
    every = text.get("full_attention_interval", 1)
    for index in range(text["num_hidden_layers"]):
        name = f"{prefix}layers.{index}."
        yield f"{name}input_layernorm.weight", (hidden,)
        yield f"{name}post_attention_layernorm.weight", (hidden,)
        mixer = _delta if (index + 1) % every else _attention
        yield from mixer(text, name)
        yield from _mlp(text, f"{name}mlp.", index)
    if text.get("mtp_num_hidden_layers"):
        yield "mtp.fc.weight", (hidden, 2 * hidden)
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            yield f"mtp.{norm}.weight", (hidden,)
        yield "mtp.layers.0.input_layernorm.weight", (hidden,)
        yield "mtp.layers.0.post_attention_layernorm.weight", (hidden,)
        yield from _attention(text, "mtp.layers.0.")
        yield from _mlp(text, "mtp.layers.0.mlp.", text["num_hidden_layers"] - 1)


def _attention(text: dict[str, Any], name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, kv_heads = (
        text[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    dim = text.get("head_dim", hidden // heads)
    gated = 2 if text["model_type"] in HYBRIDS else 1
    name = f"{name}self_attn."
    for part, rows in (("q", gated * heads), ("k", kv_heads), ("v", kv_heads)):
        yield f"{name}{part}_proj.weight", (rows * dim, hidden)
        if text["model_type"] == "qwen2" or text.get("attention_bias"):
            yield f"{name}{part}_proj.bias", (rows * dim,)
    yield f"{name}o_proj.weight", (hidden, heads * dim)
    if text.get("attention_bias"):
        yield f"{name}o_proj.bias", (hidden,)
    if text["model_type"].startswith("qwen3"):
        yield f"{name}q_norm.weight", (dim,)
        yield f"{name}k_norm.weight", (dim,)


def _delta(text: dict[str, Any], name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, name = text["hidden_size"], f"{name}linear_attn."
    k_heads, v_heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
    keys = k_heads * text["linear_key_head_dim"]
    values = v_heads * text["linear_value_head_dim"]
    if text["model_type"] == "qwen3_next":
        projections = {"qkvz": 2 * keys + 2 * values, "ba": 2 * v_heads}
    else:
        projections = {"qkv": 2 * keys + values, "z": values, "b": v_heads, "a": v_heads}
    for part, rows in projections.items():
        yield f"{name}in_proj_{part}.weight", (rows, hidden)
    yield f"{name}conv1d.weight", (2 * keys + values, 1, text["linear_conv_kernel_dim"])
    yield f"{name}A_log", (v_heads,)
    yield f"{name}dt_bias", (v_heads,)
    yield f"{name}norm.weight", (text["linear_value_head_dim"],)
    yield f"{name}out_proj.weight", (hidden, values)


def _mlp(text: dict[str, Any], name: str, index: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = text["hidden_size"]
    if "num_experts" not in text or index in text.get("mlp_only_layers", ()):
        yield from _dense(name, hidden, text["intermediate_size"])
        if text.get("mlp_bias"):
            for part, rows in (
                ("gate", "intermediate"),
                ("up", "intermediate"),
                ("down", "hidden"),
            ):
                yield f"{name}{part}_proj.bias", (text[f"{rows}_size"],)
        return
    num_experts, size = text["num_experts"], text["moe_intermediate_size"]
    yield f"{name}gate.weight", (num_experts, hidden)
    if text["model_type"] == "qwen3_5_moe":
        yield f"{name}experts.gate_up_proj", (num_experts, 2 * size, hidden)
        yield f"{name}experts.down_proj", (num_experts, hidden, size)
    else:
        for expert in range(num_experts):
            yield from _dense(f"{name}experts.{expert}.", hidden, size)
    if text["model_type"] != "qwen3_moe":
        yield from _dense(f"{name}shared_expert.", hidden, text["shared_expert_intermediate_size"])
        yield f"{name}shared_expert_gate.weight", (1, hidden)


def _dense(name: str, hidden: int, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}gate_proj.weight", (size, hidden)
    yield f"{name}up_proj.weight", (size, hidden)
    yield f"{name}down_proj.weight", (hidden, size)
