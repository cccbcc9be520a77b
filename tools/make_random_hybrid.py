"""Writes a hybrid of random weights as Hugging Face stores one: Qwen3.5-0.8B's shape, or a tiny one.

    python tools/make_random_hybrid.py DIR [--shape tiny | agents | smollm2-135m] [--max-len 65536]
    pippin serve --backend torch --model DIR

Other shapes have attention alone: SmolLM2-135M's, Qwen3-0.6B's, Llama-3.2-1B's, and eight layers of
Qwen3-30B-A3B's.

What a model writes is nonsense without training, but its speed is the same. The tokenizer is the
bundled one, its vocabulary filled up, so that every token has text. The shape `agents` has
Qwen3.5's own tokenizer and template, 131,072 positions and four narrow layers in float32, so that
an agent's prompt of 20,000 tokens is computed in seconds on two cores. It ends its reasoning, as a
trained model does: some 40 random words, `</think>`, an empty line. Needs torch and safetensors.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import re
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

import torch
from safetensors.torch import save_file

from pippin.backends.torch.config import read_shape
from pippin.backends.torch.models.build import build_decoder
from pippin.backends.torch.shapes import (
    AttentionShape,
    DeltaShape,
    DenseShape,
    ExpertShape,
    ModelShape,
)

QWEN3_5 = ROOT / "tests" / "fixtures" / "qwen3.5"  # its tokenizer, compressed, and its template
BUNDLED = ROOT / "src" / "pippin" / "models" / "stories-hybrid-20m"
COPIED = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")

QWEN3_5_0_8B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "dtype": "bfloat16",
    "eos_token_id": [2, 0],  # the bundled tokenizer's
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_5_text",
        "tie_word_embeddings": True,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "vocab_size": 248_320,
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        },
    },
}

TINY = QWEN3_5_0_8B | {
    "text_config": QWEN3_5_0_8B["text_config"]
    | {"hidden_size": 128, "num_hidden_layers": 8, "vocab_size": 8500, "intermediate_size": 256}
    | {"num_attention_heads": 4, "head_dim": 32, "max_position_embeddings": 4096}
    | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
    | {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
}
AGENTS = QWEN3_5_0_8B | {
    "dtype": "float32",
    "eos_token_id": [248_046, 248_044],  # <|im_end|>, <|endoftext|>
    "tie_word_embeddings": False,
    "text_config": QWEN3_5_0_8B["text_config"]
    | {"tie_word_embeddings": False}
    | {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128}
    | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    | {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    | {"max_position_embeddings": 131_072},
}
NUM_REASONING_LINES, NUM_WORDS_OF_A_LINE = 8, 5  # of the shape for agents, on average
_ATTENTION: dict[str, Any] = {
    "dtype": "bfloat16",
    "eos_token_id": [2, 0],
    "head_dim": 128,
    "max_position_embeddings": 131_072 + 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
QWEN3_0_6B = _ATTENTION | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "tie_word_embeddings": True,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "vocab_size": 151_936,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}
LLAMA_3_2_1B = _ATTENTION | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "tie_word_embeddings": True,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "vocab_size": 128_256,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
}
SMOLLM2_135M = LLAMA_3_2_1B | {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "vocab_size": 49_152,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 1e5,
}
QWEN3_30B_A3B_8 = _ATTENTION | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "hidden_size": 2048,
    "num_hidden_layers": 8,  # of 48
    "vocab_size": 151_936,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SHAPES = {
    "0.8b": QWEN3_5_0_8B,
    "tiny": TINY,
    "agents": AGENTS,
    "smollm2-135m": SMOLLM2_135M,
    "qwen3-0.6b": QWEN3_0_6B,
    "llama-3.2-1b": LLAMA_3_2_1B,
    "qwen3-30b-a3b-8": QWEN3_30B_A3B_8,
}


class RandomWeights:
    """Of a model's shape; the same for the same name."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device

    def has(self, name: str) -> bool:
        """Not biases, nor what some families store in one piece, or by other names."""
        if name.endswith("bias"):
            return name.endswith("dt_bias")
        others = ("qkv_proj.", "gate_up_proj.", "_proj_blocks", "block_sparse_moe.", "switch_mlp.", ".w1.")
        return not any(part in name for part in others)

    def take(self, name: str, *, exact: bool = False) -> torch.Tensor:
        size = self._size(name.split("layers.")[-1])
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(size, generator=generator, device=self._device)
        if name.endswith("norm.weight"):
            values = values * 0.0 + (not self._shape.norm_offset or "linear_attn.norm" in name)
        elif len(size) > 1:
            values = values * 0.02
        return values.to(torch.float32 if exact else self._dtype)

    def _size(self, name: str) -> tuple[int, ...]:
        if name.endswith("_proj.bias"):
            return self._size(name.removesuffix("bias") + "weight")[:1]
        shape, hidden = self._shape, self._shape.hidden
        dense = (layer.mlp for layer in shape.layers if isinstance(layer.mlp, DenseShape))
        intermediate = next(dense, DenseShape(0)).intermediate
        sizes: dict[str, tuple[int, ...]] = {
            "embed_tokens": (shape.vocab_size, hidden),
            "lm_head": (shape.vocab_size, hidden),
            **self._delta_sizes(),
            **self._attention_sizes(),
            "norm": (hidden,),
            **self._expert_sizes(),
            "gate_proj": (intermediate, hidden),
            "up_proj": (intermediate, hidden),
            "down_proj": (hidden, intermediate),
        }
        return next(size for part, size in sizes.items() if part in name)

    def _attention_sizes(self) -> dict[str, tuple[int, ...]]:
        hidden = self._shape.hidden
        for mixer in self._shape.mixers(AttentionShape)[-1:]:
            heads, kv = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
            return {
                "q_norm": (mixer.head_dim,),
                "k_norm": (mixer.head_dim,),
                "q_proj": ((1 + mixer.gated) * heads, hidden),
                "k_proj": (kv, hidden),
                "v_proj": (kv, hidden),
                "o_proj": (hidden, heads),
            }
        return {}

    def _delta_sizes(self) -> dict[str, tuple[int, ...]]:
        delta, hidden = self._shape.recurrent, self._shape.hidden
        if not isinstance(delta, DeltaShape):
            return {}
        values = delta.num_v_heads * delta.v_dim
        return {
            "linear_attn.norm": (delta.v_dim,),
            "in_proj_qkvz": (delta.num_channels + values, hidden),
            "in_proj_ba": (2 * delta.num_v_heads, hidden),
            "in_proj_qkv": (delta.num_channels, hidden),
            "in_proj_z": (values, hidden),
            "in_proj_b": (delta.num_v_heads, hidden),
            "in_proj_a": (delta.num_v_heads, hidden),
            "conv1d": (delta.num_channels, 1, delta.num_taps),
            "A_log": (delta.num_v_heads,),
            "dt_bias": (delta.num_v_heads,),
            "out_proj": (hidden, values),
        }

    def _expert_sizes(self) -> dict[str, tuple[int, ...]]:
        mlps, hidden = (layer.mlp for layer in self._shape.layers), self._shape.hidden
        experts = next((mlp for mlp in mlps if isinstance(mlp, ExpertShape)), None)
        if experts is None:
            return {}
        number, size = experts.num_experts, experts.intermediate
        shared = experts.shared_intermediate
        return {
            "mlp.gate.": (number, hidden),
            "experts.gate_up_proj": (number, 2 * size, hidden),
            "experts.down_proj": (number, hidden, size),
            "shared_expert_gate": (1, hidden),
            "shared_expert.gate_proj": (shared, hidden),
            "shared_expert.up_proj": (shared, hidden),
            "shared_expert.down_proj": (hidden, shared),
        }


class Recorded(RandomWeights):
    """Remembers what a model took, which is what a checkpoint has to hold."""

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, dtype, device)
        self.taken: dict[str, torch.Tensor] = {}

    def take(self, name: str, *, exact: bool = False) -> torch.Tensor:
        tensor = super().take(name, exact=exact)
        self.taken[name] = tensor.to(self._dtype).cpu()
        return tensor


def write_weights(
    target: Path,
    config: dict[str, Any],
    dtype: torch.dtype,
    vocab: dict[str, int] | None = None,
) -> None:
    """config.json and model.safetensors; with Qwen3.5's `vocab`, it ends its reasoning."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = read_shape(config)
    weights = Recorded(shape, dtype, device)
    with torch.inference_mode():
        build_decoder(shape, weights, dtype, device, shape.max_len)
        if vocab is not None:
            end_reasoning(weights.taken, vocab, shape.prefix)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(weights.taken, target / "model.safetensors", {"format": "pt"})


def end_reasoning(weights: dict[str, torch.Tensor], vocab: dict[str, int], prefix: str) -> None:
    """What follows a token depends on its kind, and each kind has a dimension of its own.

    A line's end, as behind `<think>`, is followed by a word or by `</think>`, a word by more of
    them or by a full stop, that by a line's end, and `</think>` by an empty line. These are the
    tokens that a tokenizer makes of such a text: a client's copy of it has the same ones.
    """
    first = [id for token, id in vocab.items() if re.fullmatch("[a-z]{3,9}", token)]
    words = [id for token, id in vocab.items() if re.fullmatch("Ġ[a-z]{3,9}", token)]
    kinds = (
        (["Ċ"], first, "</think>", NUM_REASONING_LINES),
        ([*first, *words], words, ".", NUM_WORDS_OF_A_LINE),
        (["."], [], "Ċ", 1),
        (["</think>"], [], "ĊĊ", 1),
        (["ĊĊ"], [], '"', 1),  # JSON may begin with any number of spaces
    )
    embed, head = weights[f"{prefix}embed_tokens.weight"], weights["lm_head.weight"]
    norm = math.sqrt(embed.shape[1])  # of what the head reads
    logit = 40.0  # other tokens have about 1
    for dimension, (tokens, likely, end, mean) in enumerate(kinds):
        ids = [token if isinstance(token, int) else vocab[token] for token in tokens]
        embed[ids, dimension] = 100.0
        head[likely, dimension] = logit / norm
        head[vocab[end], dimension] = (logit + math.log(max(1, len(likely)) / mean)) / norm


def write_tokenizer(target: Path, vocab_size: int) -> None:
    for name in COPIED:
        shutil.copy(BUNDLED / name, target / name)
    tokenizer = json.loads((BUNDLED / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    for token_id in range(max(vocab.values()) + 1, vocab_size):
        vocab[f"Ġword{token_id}"] = token_id  # a word that no merge leads to
    (target / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def write_qwen_tokenizer(target: Path) -> dict[str, int]:
    """Qwen3.5's own, whose last ids have no text, as in the original; its vocabulary."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(QWEN3_5 / "chat_template.jinja", target / "chat_template.jinja")
    tokenizer = lzma.decompress((QWEN3_5 / "tokenizer.json.xz").read_bytes())
    (target / "tokenizer.json").write_bytes(tokenizer)
    fields = json.loads(tokenizer)
    added = {token["content"]: token["id"] for token in fields["added_tokens"]}
    return {**fields["model"]["vocab"], **added}


def write_model(target: Path, shape: str, max_len: int | None = None) -> None:
    """Weights, config and tokenizer; `max_len`: tokens that it holds, if not as many as usual."""
    config = SHAPES[shape]
    text = config.get("text_config", config)
    if max_len is not None:
        text = text | {"max_position_embeddings": max_len}
        config = config | {"text_config": text} if "text_config" in config else text
    dtype = getattr(torch, config["dtype"])
    if shape == "agents":
        write_weights(target, config, dtype, write_qwen_tokenizer(target))
    else:
        write_weights(target, config, dtype)
        write_tokenizer(target, text["vocab_size"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("dir", type=Path, help="where to write it; made if need be")
    parser.add_argument("--shape", choices=SHAPES, default="0.8b")
    parser.add_argument(
        "--max-len", type=int, help="tokens of its longest prompt and reply together"
    )
    options = parser.parse_args()
    write_model(options.dir, options.shape, options.max_len)
    print(f"wrote {options.dir}; try: pippin serve --backend torch --model {options.dir}")


if __name__ == "__main__":
    main()
