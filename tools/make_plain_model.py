"""Writes a plain attention model with random weights, for comparisons: SmolLM2-135M's shape.

    python tools/make_plain_model.py DIR [--seed 0]
    pippin bench compare --model DIR

Most people serve models with nothing but attention layers, and the bundled one is a hybrid. What a
model writes is nonsense without training, but its speed is the same. The tokenizer is the bundled
one, its vocabulary filled up with words that no text becomes, so that every token has text.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from pippin.startup.checkpoint import find_checkpoint
from pippin.config import ModelConfig

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": [2, 0],  # the bundled tokenizer's
}
COPIED = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")
DEVIATION = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=Path, help="where to write it; made if need be")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    write_plain_model(options.dir, CONFIG, seed=options.seed)
    print(f"wrote {options.dir}; try: pippin bench compare --model {options.dir}")


def write_plain_model(target: Path, config: dict[str, object], *, seed: int = 0) -> None:
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    weights = random_weights(config, seed)
    mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})
    bundled = find_checkpoint(ModelConfig())
    for name in COPIED:
        shutil.copy(bundled / name, target / name)
    tokenizer = json.loads((bundled / "tokenizer.json").read_text(encoding="utf-8"))
    vocab_size = config["vocab_size"]
    assert isinstance(vocab_size, int)
    fill_up(tokenizer["model"]["vocab"], vocab_size)
    (target / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def random_weights(config: dict[str, object], seed: int) -> dict[str, mx.array]:
    """Of bfloat16; vectors are left as they are made: norms of ones."""
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    return {
        name: (mx.random.normal(w.shape) * DEVIATION if w.ndim > 1 else w).astype(mx.bfloat16)
        for name, w in tree_flatten(model.parameters())
    }


def fill_up(vocab: dict[str, int], size: int) -> None:
    """Words that no merge leads to: a tokenizer decodes them, and never encodes to them."""
    for token_id in range(max(vocab.values()) + 1, size):
        vocab[f"Ġword{token_id}"] = token_id  # Ġ is how byte-level vocabularies write a space


if __name__ == "__main__":
    main()
