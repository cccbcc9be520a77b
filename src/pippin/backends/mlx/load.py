"""Loads a checkpoint through mlx-lm and makes it ours: dtype, substitutions, layout."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import make_prompt_cache

from pippin.backends.fallbacks import note_fallback
from pippin.backends.mlx import refusals, substitutions
from pippin.backends.mlx.attention.head_ropes import head_norms
from pippin.backends.mlx.attention.packed_rows import AttentionPaths
from pippin.backends.mlx.cpu.blas import load_fast_blas
from pippin.backends.mlx.cpu.layers import pack_linear_layers
from pippin.backends.mlx.cpu.operations import (
    compile_without_fusing,
    find_operations,
    operations,
    without_operations,
)
from pippin.backends.mlx.device import on_cpu, on_metal
from pippin.backends.mlx.drafts.mtp_head import MTPHead, load_mtp_head
from pippin.backends.mlx.gpu.added_norms import use_pending_sums
from pippin.backends.mlx.head import Head, measure_hidden
from pippin.backends.mlx.layout import Layout, discover
from pippin.backends.mlx.linear_groups import find_linear_groups, stack_linear_layers
from pippin.backends.mlx.mlx_lm_package import import_load_model
from pippin.backends.mlx.recurrent.taps import can_tap
from pippin.backends.mlx.rows.decode_forward import Forward
from pippin.backends.mlx.trial_run import adds_later, deferred_norms, packed_rows, runnable_layout
from pippin.errors import LoadError, UnsupportedLayout

load_model = import_load_model()
logger = logging.getLogger(__name__)

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    model: Module
    head: Head
    layout: Layout
    vocab_size: int
    dtype: mx.Dtype  # of logits, and so of the arithmetic before them
    max_len: int
    name: str
    state_taps: bool = False
    hidden_bytes: int = 0  # of what the head reads of one token; 0: not known
    attention: AttentionPaths = field(default_factory=AttentionPaths)  # of decode steps
    safe: bool = False  # plain operations of mlx alone
    mtp_head: MTPHead | None = None
    draft: LoadedModel | None = None  # a smaller model of the same tokenizer

    def forward(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """Logits [rows, n, vocab]: for the head's positions if it has any, else for all."""
        return _forward(self.model, tokens, caches, plain=self.safe)

    def forward_with_hidden(
        self, tokens: mx.array, caches: list[Any]
    ) -> tuple[mx.array, mx.array | None]:
        """Logits of every position, and what the head read of them, where that is known."""
        with self.head.keeping():
            logits = self.forward(tokens, caches)
        return logits, self.take_hidden()

    def take_hidden(self) -> mx.array | None:
        """What the head read of the last forward's positions, if `logits_after` can use it."""
        hidden = self.head.take_selected()
        return hidden if self.hidden_bytes else None

    def logits_after(self, hidden: mx.array) -> mx.array:
        """Logits [rows, 1, vocab] of hidden vectors [rows, 1, n]. No layer is computed."""
        tokens = mx.zeros((hidden.shape[0], 1), mx.int32)  # of which the layers' graph is built
        with self.head.replaying(hidden):
            return _forward(self.model, tokens, make_prompt_cache(self.model), plain=self.safe)

    def operating(self) -> AbstractContextManager[None]:
        """Whatever runs this model runs inside."""
        return without_operations() if self.safe else nullcontext()


def _check_weights(path: Path) -> None:
    """Raises if a file is not as long as its header says: `load_model` does not name it."""
    for part in sorted(path.glob("model*.safetensors")):
        try:
            mx.load(str(part))
        except RuntimeError as error:
            reason = f"{part} cannot be read, perhaps its download was cut off: {error}"
            raise LoadError(reason) from error


def load(
    path: Path,
    *,
    dtype: str = "auto",
    safe: bool = False,
    mtp: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> LoadedModel:
    """`safe`: plain operations of mlx alone. `mtp`: with the checkpoint's head for drafts, where it
    has one."""
    is_linux_cpu = on_cpu() and platform.system() == "Linux"
    if is_linux_cpu and (slow := load_fast_blas().reason) is not None:
        note_fallback("mlx's own BLAS is used, some fifty times slower", slow)
    if is_linux_cpu and not safe:
        progress("preparing CPU operations, which are compiled once on a machine")
        if (missing := find_operations().reason) is not None:
            note_fallback("mlx's own operations are used", missing)
    progress("reading the checkpoint")
    try:
        config = json.loads((path / "config.json").read_bytes())
        refusals.check(str(config.get("model_type")))
        model, config = load_model(path, lazy=True)
    except (ValueError, FileNotFoundError) as error:
        raise LoadError(f"{path.name}: {error}") from error
    except RecursionError as error:
        raise LoadError(f"{path.name}: config.json is nested too deeply to be read") from error
    except LoadError:
        raise
    except Exception as error:  # whatever a family's own code makes of a config
        _check_weights(path)
        raise LoadError(f"{path.name}: mlx-lm cannot build the model: {error!r}") from error
    mtp_head = load_mtp_head(path, model, str(config.get("model_type"))) if mtp else None
    if isinstance(mtp_head, str):
        logger.info("no drafts by MTP: %s", mtp_head)
        mtp_head = None
    with without_operations() if safe else nullcontext():
        compile_without_fusing()
        return prepare(
            model,
            config,
            dtype=dtype,
            name=path.name,
            safe=safe,
            mtp_head=mtp_head,
            progress=progress,
        )


def prepare(
    model: Module,
    config: dict[str, Any],
    *,
    dtype: str = "auto",
    name: str = "model",
    safe: bool = False,
    mtp_head: MTPHead | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> LoadedModel:
    """Make an mlx-lm model ready to serve; `config` is its config.json."""
    model_type = str(config.get("model_type", "such"))
    parts: list[Module] = [model] if mtp_head is None else [model, mtp_head]
    for part in parts:
        _cast(part, dtype)
    progress("loading weights")
    mx.eval([part.parameters() for part in parts])
    model.eval()
    progress("preparing layers")
    head = substitutions.install(model, cpu=on_cpu(), safe=safe)
    forward = partial(_forward, model, plain=safe)
    one_token = partial(forward, mx.zeros((1, 1), mx.int32))
    try:
        try:  # unevaluated: some models have kernels for one kind of GPU alone
            one_token(make_prompt_cache(model))
        except Exception as error:  # whatever the model's own code raises
            reason = f"mlx-lm's own code for them fails here: {error}"
            raise UnsupportedLayout(reason) from error
        if not safe and (not on_cpu() or operations() is not None):
            _merge_linear_layers(model, lambda: one_token(make_prompt_cache(model)))
            if mtp_head is not None:
                _merge_linear_layers(mtp_head, mtp_head.run_once)
        if mtp_head is not None:
            mtp_head.pack()
        layout = runnable_layout(discover(model, forward), forward)
    except UnsupportedLayout as error:
        raise refusals.refusal(model_type, error.message) from error
    logits = one_token(make_prompt_cache(model))
    text = config.get("text_config") or config
    hidden_bytes = measure_hidden(head, lambda: one_token(make_prompt_cache(model)))
    return LoadedModel(
        model=model,
        head=head,
        layout=layout,
        vocab_size=logits.shape[-1],
        dtype=logits.dtype,
        max_len=int(text.get("max_position_embeddings") or config.get("seq_length") or 4096),
        name=name,
        state_taps=can_tap(layout, forward),
        hidden_bytes=hidden_bytes,
        attention=AttentionPaths() if safe else _choose_attention(model, layout, forward),
        safe=safe,
        mtp_head=mtp_head if hidden_bytes else None,
    )


def _choose_attention(model: Module, layout: Layout, forward: Forward) -> AttentionPaths:
    """On GPUs, where launches count."""
    if on_cpu() or not layout.packs_rows:
        return AttentionPaths()
    kernel = packed_rows(layout, forward)
    if kernel is None:
        return AttentionPaths()
    paths = AttentionPaths(kernel, deferred_norms(layout, forward, kernel, head_norms(model)))
    if not on_metal():
        return paths
    use_pending_sums(model)
    return replace(paths, adds_later=adds_later(layout, forward, paths))


def _merge_linear_layers(model: Module, run_once: Callable[[], object]) -> None:
    groups = find_linear_groups(model, run_once)
    if on_cpu():
        pack_linear_layers(model, groups)
    else:
        stack_linear_layers(groups)


def _forward(model: Module, tokens: mx.array, caches: list[Any], *, plain: bool) -> mx.array:
    with substitutions.active(plain=plain):
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
