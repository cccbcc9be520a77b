"""Loads a checkpoint through mlx-lm and makes it ours: dtype, substitutions, layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from pippin.backends.mlx import substitutions
from pippin.backends.mlx.blas import disable_compile_unless_available
from pippin.backends.mlx.head import Head
from pippin.backends.mlx.layout import Layout, discover
from pippin.backends.mlx.linear import choose_rows
from pippin.backends.mlx.malloc import keep_large_buffers
from pippin.backends.mlx.rehearsal import rehearsed
from pippin.backends.mlx.state_taps import can_tap
from pippin.errors import LoadError

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    model: Module
    head: Head
    layout: Layout
    vocab_size: int
    max_len: int
    name: str
    state_taps: bool = False

    def forward(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """Logits [rows, n, vocab]: for the head's positions if it has any, else for all."""
        return _forward(self.model, tokens, caches)


def on_cpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.cpu))


def load(
    path: Path, *, dtype: str = "auto", progress: Callable[[str], None] = lambda _: None
) -> LoadedModel:
    disable_compile_unless_available()
    if on_cpu():
        keep_large_buffers()
    progress("reading the checkpoint")
    try:
        model, config = load_model(path, lazy=True)
    except (ValueError, FileNotFoundError) as error:
        raise LoadError(f"{path.name}: {error}") from error
    return prepare(model, config, dtype=dtype, name=path.name, progress=progress)


def prepare(
    model: Module,
    config: dict[str, Any],
    *,
    dtype: str = "auto",
    name: str = "model",
    progress: Callable[[str], None] = lambda _: None,
) -> LoadedModel:
    """Make an mlx-lm model ready to serve; `config` is its config.json."""
    _cast(model, dtype)
    progress("loading weights")
    mx.eval(model.parameters())
    model.eval()
    progress("preparing layers")
    if on_cpu():
        _choose_products(model)
    head = substitutions.install(model, cpu=on_cpu(), recurrent=not mx.metal.is_available())
    forward = partial(_forward, model)
    layout = rehearsed(discover(model, forward), forward)
    logits = forward(mx.zeros((1, 1), mx.int32), make_prompt_cache(model))
    text = config.get("text_config") or config
    return LoadedModel(
        model=model,
        head=head,
        layout=layout,
        vocab_size=logits.shape[-1],
        max_len=int(text.get("max_position_embeddings") or config.get("seq_length") or 4096),
        name=name,
        state_taps=can_tap(layout, forward),
    )


def _choose_products(model: Module) -> None:
    parts = [part for _, part in model.named_modules() if type(part) in (Linear, Embedding)]
    choose_rows([part["weight"] for part in parts])


def _forward(model: Module, tokens: mx.array, caches: list[Any]) -> mx.array:
    with substitutions.active():
        logits: mx.array = model(tokens, cache=caches)
    return logits


def _cast(model: Module, dtype: str) -> None:
    """CPUs compute float16 and bfloat16 an order slower than float32; GPUs keep the checkpoint's.

    Quantized weights are integers and keep their scales' type in step with the rest.
    """
    if dtype == "auto":
        if not on_cpu():
            return
        dtype = "float32"
    keep = getattr(model, "cast_predicate", lambda _: True)
    target = DTYPES[dtype]

    def cast(path: str, array: Any) -> Any:
        floating = isinstance(array, mx.array) and mx.issubdtype(array.dtype, mx.floating)
        return array.astype(target) if floating and (keep(path) or dtype == "float32") else array

    model.update(tree_map_with_path(cast, model.parameters()))
