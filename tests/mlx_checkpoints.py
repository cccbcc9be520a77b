"""The checkpoints of torch_families.py as mlx-lm itself saves them, and logits of both libraries.

`as_mlx_saves`: with mlx-lm's names and layouts, quantized by it where that is asked for.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

from pippin.backends.base import PrefillRow
from pippin.backends.torch.models.decoder import Decoder
from pippin.backends.torch.plain.forward import PlainForward
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.rows import Rows
from pippin.backends.torch.step.batches import chunk_batch, take_chunks
from torch_families import checkpoint

TOKENS = np.random.default_rng(0).integers(0, 256, 40)


@cache
def as_mlx_saves(name: str, bits: int | None = None, group_size: int = 32) -> Path:
    source = checkpoint(name)
    path = source.with_name(f"{source.name}-mlx-{bits}-{group_size}")
    model, config = load_model(source)
    if bits is not None:
        model, config = quantize_model(model, config, group_size, bits)
    save_model(path, model)
    save_config(config, path / "config.json")
    return path


def mlx_logits(path: Path) -> np.ndarray:
    """[tokens, vocab], in float32 throughout."""
    model, _ = load_model(path)
    model.set_dtype(mx.float32)
    return _logits(model)


def _logits(model: nn.Module) -> np.ndarray:
    return np.array(model(mx.array([TOKENS.tolist()]), cache=make_prompt_cache(model))[0])


def torch_logits(decoder: Decoder, forward: Any = PlainForward) -> np.ndarray:
    layout = PoolLayout(decoder.shape, decoder.dtype)
    pools = Pools(layout, 64 * layout.slab_bytes, decoder.device)
    pools.memory.zero_()
    rows = Rows(pools, 1, 64)
    run: PlainForward = forward(decoder, pools)
    with torch.inference_mode():
        taken = take_chunks([PrefillRow(1, 0, TOKENS.astype(np.int32))], rows, pools)
        hidden = run.hidden(chunk_batch(taken, rows, pools))
        return decoder.head(hidden).float().cpu().numpy()
