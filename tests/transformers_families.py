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
from families import CONFIGS
from near_ties import log_softmax
from small_models import Config, draw_values

_LFM2 = CONFIGS["lfm2"]
# Transformers clips time steps of prompts below, where the family's own code does not.
_NEMOTRON_H = CONFIGS["nemotron_h"] | {"head_dim": 16, "time_step_min": 1e-9}
STATE_CONFIGS: dict[str, Config] = {
    "lfm2": _LFM2,
    "lfm2_biases": _LFM2 | {"conv_bias": True, "block_auto_adjust_ff_dim": False},
    "nemotron_h": _NEMOTRON_H | {"hybrid_override_pattern": "M-M*-M*"},
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
