"""Recurrent layers and feed-forwards of a decode step, compiled one by one. Knows no rows.

A whole step is compiled where its shape stays for a while (decode_forward.py). While requests come
and go it does not: cohorts differ from step to step. But only attention sees cohorts; what a
recurrent layer or a feed-forward computes depends on the number of rows alone, so that a compiled
one serves all steps of that width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache

from pippin.backends.mlx.layout import Layout

FEED_FORWARDS = ("mlp", "feed_forward")
EXPERTS = ("Switch", "Moe", "MoE")  # in a module's name: how many rows an expert gets is data

_compiles = False


@contextmanager
def compiling(active: bool) -> Iterator[None]:
    """Inside, layers that can be compiled are, if `active`."""
    global _compiles
    before, _compiles = _compiles, active
    try:
        yield
    finally:
        _compiles = before


def install(model: Module, layout: Layout) -> None:
    """Make over, in place, what may be compiled by itself."""
    layers: list[Module] = model.layers
    has_kv = {leaf.layer for leaf in layout.leaves if not leaf.is_state}
    has_state = {leaf.layer for leaf in layout.leaves if leaf.is_state}
    for index, layer in enumerate(layers):
        if _has_experts(layer):
            continue
        if index in has_state and index not in has_kv:
            _compile_recurrent(layer)
            continue
        for name in FEED_FORWARDS:
            if isinstance(part := layer.get(name), Module):
                _compile_feed_forward(part)


def _has_experts(layer: Module) -> bool:
    names = [type(part).__name__ for _, part in layer.named_modules()]
    return any(word in name for name in names for word in EXPERTS)


def _compile_feed_forward(part: Module) -> None:
    cls = type(part)
    compiled = mx.compile(lambda x: cls.__call__(part, x))

    def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        plain = args or kwargs or x.shape[1] != 1 or not _compiles
        return cls.__call__(self, x, *args, **kwargs) if plain else compiled(x)

    part.__class__ = type(cls.__name__, (cls,), {"__call__": call})


def _compile_recurrent(layer: Module) -> None:
    cls = type(layer)
    run = mx.compile(_pure(cls, layer))

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None, **kwargs: Any) -> Any:
        if not _compiles or kwargs or mask is not None or not _one_whole_token(x, cache):
            return cls.__call__(self, x, mask=mask, cache=cache, **kwargs)
        y, cache.cache = run(x, list(cache.cache))
        return y

    layer.__class__ = type(cls.__name__, (cls,), {"__call__": call})


def _one_whole_token(x: mx.array, cache: Any) -> bool:
    if x.shape[1] != 1 or type(cache) is not ArraysCache:
        return False
    return cache.lengths is None and all(entry is not None for entry in cache.cache)


def _pure(
    cls: type[Module], layer: Module
) -> Callable[[mx.array, list[mx.array]], tuple[mx.array, list[mx.array]]]:
    """The layer as a function of arrays."""

    def run(x: mx.array, entries: list[mx.array]) -> tuple[mx.array, list[mx.array]]:
        view: Any = ArraysCache(size=len(entries))
        view.cache = entries
        y: mx.array = cls.__call__(layer, x, mask=None, cache=view)  # type: ignore[operator]
        return y, list(view.cache)

    return run
