"""The short list of things that change in an mlx-lm model, made at load, all in this file.

    scaled_dot_product_attention   over our row views (attention/views.py); in prefill
                                   by blocks of queries where scores are many (query_blocks.py)
    gated_delta_update             the chunked recurrence, where mlx-lm has no kernel for it
    ssm_update                     likewise, for Mamba-2 layers
    normalize_qk (GPU)             scales as the norms' weights
    Conv1d (depthwise)             shifted multiply-adds, on GPUs for one token; can be tapped
    gather_mm, gather_qmm (GPU)    experts' rows are numbered once, not in every call
    RMSNorm (Gemma)                1 is added to its weight once, not in every call
    Linear                         GPU: those of one input as one product;
                                   CPU: one operation (cpu/operations)
    rms_norm, rope, swiglu (CPU)   one operation each (cpu/operations)
    rms_norm (Metal)               with the sum before it, in decode steps (gpu/added_norms.py);
                                   clip_residual (Gemma 3) is such a sum
    SwitchGLU (Metal)              both products of an input as one (gpu/experts.py)
    GatedDeltaNet                  runs drafts, and those that were accepted (recurrent/replay.py);
                                   CPU: one operation between its products
    Llama 4, MiniMax M3            code that has a position for each row (families.py)
    the language-model head        computed only for the positions that are asked for (head.py)

Functions are bound by name in each model module, so the module's name is rebound to a dispatcher.
Outside our own forwards (`active()`) it calls the original: stock mlx-lm in the same process stays
stock, also in a thread that runs beside them. Modules are changed per instance by giving them a
subclass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.convolution import Conv1d
from mlx.nn.layers.normalization import RMSNorm
from mlx_lm.models import activations as mlx_lm_activations
from mlx_lm.models import base, gated_delta, gemma3_text, ssm

from pippin.backends.mlx.attention import head_ropes
from pippin.backends.mlx.attention.decode_step import NOT_ITS_KEYS, WITHOUT_ITS_MASK, RowMask
from pippin.backends.mlx.attention.views import RowKV, array_of
from pippin.backends.mlx.cpu import operations as drop_ins
from pippin.backends.mlx.cpu.layers import pack_head, use_one_operation
from pippin.backends.mlx.device import on_metal
from pippin.backends.mlx.families import use_rows_code
from pippin.backends.mlx.gpu import added_norms, experts
from pippin.backends.mlx.gpu.delta_layer import use_delta_kernel
from pippin.backends.mlx.gpu.experts import stack_experts, use_expert_kernels
from pippin.backends.mlx.head import Head
from pippin.backends.mlx.layout import ProbeKV
from pippin.backends.mlx.prefill import query_blocks
from pippin.backends.mlx.recurrent.recurrences import gated_delta_update, normalize_qk, ssm_update
from pippin.backends.mlx.recurrent.replay import use_replay
from pippin.backends.mlx.recurrent.taps import is_depthwise, use_shift_conv1d

_ORIGINALS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": base.scaled_dot_product_attention,
    "gated_delta_update": gated_delta.gated_delta_update,
    "ssm_update": ssm.ssm_update,
    "normalize_qk": gated_delta.normalize_qk,
    "swiglu": mlx_lm_activations.swiglu,
    "rms_norm": mx.fast.rms_norm,
    "rope": mx.fast.rope,
    "clip_residual": gemma3_text.clip_residual,
    "gather_mm": mx.gather_mm,
    "gather_qmm": mx.gather_qmm,
}

RECURRENCES = ("gated_delta_update", "ssm_update")

# Inside a forward of ours: whether it is of plain operations alone. None: outside.
_forward_is_plain: ContextVar[bool | None] = ContextVar("pippin_forward", default=None)


@contextmanager
def active(*, plain: bool = False) -> Iterator[None]:
    """Our own forward runs inside; everything else in the process, in this thread before and after
    or in another one meanwhile, sees stock mlx-lm. `plain`: without mlx-lm's kernels."""
    token = _forward_is_plain.set(plain)
    try:
        yield
    finally:
        _forward_is_plain.reset(token)


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any = None,
    scale: float = 1.0,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's attention function, and split attention where the cache is one of our rows."""
    keys, values = array_of(keys), array_of(values)
    rows = _row_view(keys, cache, mask)
    if rows is not None and mask is not None:
        return rows.attend(queries, scale, mask, sinks)
    if isinstance(mask, RowMask) or (isinstance(cache, RowKV) and mask is None):
        raise TypeError(WITHOUT_ITS_MASK)
    if isinstance(cache, ProbeKV):
        mask = cache.seen_by_attention(keys, values, mask)
    if isinstance(mask, mx.array) and mask.ndim == 5:  # made for layers that group heads
        mask = mask[:, 0]
    # What mlx-lm's own function comes to: no cache of ours is quantized.
    whole = partial(drop_ins.attention, scale=scale, sinks=sinks)
    return query_blocks.attend(whole, queries, keys, values, mask)


def _row_view(keys: mx.array, cache: Any, mask: Any) -> RowKV | None:
    """The view of decode rows that gave the model these keys in place of all that rows hold.

    It may be another layer's than the one that `cache` is of.
    """
    source = mask if isinstance(mask, RowMask) else cache
    knows = isinstance(source, RowMask | RowKV)
    rows: RowKV | None = source.step.lender(keys) if knows else None
    if rows is None and isinstance(cache, RowKV) and cache.layer_cache.splits:
        raise TypeError(NOT_ITS_KEYS)
    return rows


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": attention,
    "gated_delta_update": gated_delta_update,
    "ssm_update": ssm_update,
    "normalize_qk": normalize_qk,
    "swiglu": drop_ins.swiglu,
    "rms_norm": added_norms.rms_norm,
    "rope": head_ropes.rope,
    "clip_residual": added_norms.clip_residual,
    "gather_mm": experts.gather_mm,
    "gather_qmm": experts.gather_qmm,
}


def _dispatcher(name: str) -> Callable[..., Any]:
    original, replacement = _ORIGINALS[name], _REPLACEMENTS[name]

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        is_plain = _forward_is_plain.get()
        if is_plain is None:
            return original(*args, **kwargs)
        if name in RECURRENCES and is_plain:
            kwargs["use_kernel"] = False
        return replacement(*args, **kwargs)

    dispatch.__name__ = name
    return dispatch


_DISPATCHERS = {name: _dispatcher(name) for name in _ORIGINALS}


def install(model: Module, *, cpu: bool, safe: bool = False) -> Head:
    """Substitute in `model` and its modules. `safe`: by plain operations alone."""
    names = ["scaled_dot_product_attention", *RECURRENCES]
    has_operations = cpu and not safe
    if has_operations:
        names.append("swiglu")
    if not safe:
        head_ropes.use_gain_rope(model)
        mx.fast.rms_norm, mx.fast.rope = _DISPATCHERS["rms_norm"], _DISPATCHERS["rope"]
    if not cpu:
        names += ["normalize_qk", "clip_residual"]
        mx.gather_mm, mx.gather_qmm = _DISPATCHERS["gather_mm"], _DISPATCHERS["gather_qmm"]
    for module in _python_modules(model):
        for name in names:
            if getattr(module, name, None) is _ORIGINALS[name]:
                setattr(module, name, _DISPATCHERS[name])
    use_rows_code(model)
    use_replay(model)
    for _, part in model.named_modules():
        if type(part) is Conv1d and is_depthwise(part):
            use_shift_conv1d(part, cpu=cpu)
        elif type(part).__name__ == "RMSNorm" and _adds_one(part):
            _add_one(part)
    if has_operations:
        use_one_operation(model)
        pack_head(model)
    elif on_metal() and not safe:
        use_delta_kernel(model)
        stack_experts(model)
        use_expert_kernels(model)
    return Head(model)


def _adds_one(norm: Any) -> bool:
    """Tried: only the class's own code says what it does with its weight."""
    if type(norm) is RMSNorm or set(norm.parameters()) != {"weight"} or not hasattr(norm, "eps"):
        return False
    x = mx.arange(norm.weight.size, dtype=mx.float32).astype(norm.weight.dtype)[None]
    return bool(mx.array_equal(norm(x), mx.fast.rms_norm(x, 1.0 + norm.weight, norm.eps)))


def _add_one(norm: Any) -> None:
    norm._whole_weight = 1.0 + norm.weight  # not a parameter: its name begins with _
    mx.eval(norm._whole_weight)

    def call(self: Any, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self._whole_weight, self.eps)

    norm.__class__ = type("RMSNorm", (type(norm),), {"__call__": call})


def _python_modules(model: Module) -> list[Any]:
    names = {type(part).__module__ for _, part in model.named_modules()}
    return [sys.modules[name] for name in sorted(names) if name.startswith("mlx_lm.models.")]
