"""Draws the weights of small models. Knows no family and nothing of Pippin.

Weights depend only on the seed and the parameter's name, so two builds are two equal, independent
models: one to serve, one to stay plain mlx-lm. Their scales are chosen so that what a model says
next depends on all it has read, and greedy choices are clear.
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

Config = dict[str, Any]


def build_from(config: Config, *, seed: int = 0) -> nn.Module:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(_copy(config)))

    # Where a model multiplies its embeddings, they are small: else it would repeat its last token.
    embedding_scale = config.get("text_config", config).get("initializer_range", 1.0)

    def draw(path: str, array: mx.array) -> mx.array:
        rng = np.random.default_rng([seed, zlib.crc32(path.encode())])
        values = draw_values(path, array.shape, rng)
        scale = embedding_scale if "embed_tokens." in path else 1.0
        return mx.array((scale * values).astype(np.float32))

    model.update(tree_map_with_path(draw, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def draw_values(path: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Values by the parameter's role, which its name and shape tell."""
    name = path.split(".")[-1]
    noise = np.asarray(rng.standard_normal(shape))
    if name == "A_log":  # memories of a few tokens to a few hundred
        return rng.uniform(-5.0, 0.0, shape)
    if name == "dt_bias":
        return rng.uniform(-2.0, 1.0, shape)
    if name == "D" or (name == "weight" and len(shape) == 1):
        return 1.0 + 0.1 * noise
    if not shape:  # scales of one number
        return 1.0 + 0.1 * np.abs(noise)
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
