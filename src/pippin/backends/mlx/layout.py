"""What each layer of a model keeps, read from the model's own cache objects.

A layer's cache may be several caches in one (CacheList); each plain cache is a *leaf*. The first
layer is not special, and a kind that is not known here is an error at load, never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from pippin.errors import UnsupportedLayout
from pippin.types import Component, LayerSpec


@dataclass(frozen=True)
class Leaf:
    """One plain cache of one layer."""

    layer: int
    component: Component
    window: int | None = None
    # KV: the shapes of one token's keys and values, (heads, dim). State: of each entry, per row.
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[mx.Dtype, ...] = ()
    splits: bool = False  # attends through mlx-lm's function: main and tail can stay apart

    @property
    def nbytes(self) -> int:
        """Per token for KV, per sequence for a state."""
        total = 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            size = 1
            for extent in shape:
                size *= extent
            total += size * dtype.size
        return total

    @property
    def is_state(self) -> bool:
        return self.component is Component.STATE


class ProbeKV:
    """Stands in for a KV cache in one forward of one token that is built but never evaluated."""

    def __init__(self) -> None:
        self.offset = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.splits = False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values
        self.offset += keys.shape[2]
        return keys, values

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def seen_by_attention(self, keys: Any, values: Any, mask: Any) -> None:
        """Called by the substituted attention function: does the model attend in the plain way?"""
        self.splits = keys is self.keys and values is self.values and mask is None


@dataclass(frozen=True)
class Layout:
    """Leaves in order, and how they nest back into what the model is called with."""

    leaves: tuple[Leaf, ...]
    nesting: tuple[int, ...]  # leaves per layer cache; 0: a plain cache, n: a CacheList of n
    pads: bool = True  # recurrent layers pass over padding: uneven chunks can share a forward

    def nest(self, views: Sequence[Any]) -> list[Any]:
        """One view per leaf, arranged as the model expects its `cache` argument."""
        rest = iter(views)
        return [
            CacheList(*(next(rest) for _ in range(count))) if count else next(rest)
            for count in self.nesting
        ]

    @cached_property
    def kv_indices(self) -> tuple[int, ...]:
        return tuple(i for i, leaf in enumerate(self.leaves) if not leaf.is_state)

    @cached_property
    def state_indices(self) -> tuple[int, ...]:
        return self.indices(Component.STATE)

    @cached_property
    def window_classes(self) -> tuple[int | None, ...]:
        """The distinct windows of the KV leaves; leaves of one class store the same tokens."""
        return tuple(dict.fromkeys(self.leaves[i].window for i in self.kv_indices))

    def indices(self, component: Component) -> tuple[int, ...]:
        return tuple(i for i, leaf in enumerate(self.leaves) if leaf.component is component)

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        return tuple(
            LayerSpec(leaf.layer, leaf.component, leaf.nbytes, leaf.window) for leaf in self.leaves
        )

    @property
    def splits(self) -> bool:
        """Every attention layer can read main and tail apart."""
        return all(leaf.splits for leaf in self.leaves if not leaf.is_state)


def discover(model: Any, forward: Callable[[mx.array, list[Any]], mx.array]) -> Layout:
    """Read the kinds from the model's caches, and the shapes from one unevaluated forward."""
    kinds, nesting = _kinds(make_prompt_cache(model))
    views: list[Any] = [
        ArraysCache(size=size) if leaf.is_state else ProbeKV() for leaf, size in kinds
    ]
    shell = Layout(tuple(leaf for leaf, _ in kinds), nesting)
    forward(mx.zeros((1, 1), dtype=mx.int32), shell.nest(views))
    leaves = tuple(_with_shapes(leaf, view) for leaf, view in zip(shell.leaves, views, strict=True))
    return Layout(leaves, nesting)


def _kinds(caches: Sequence[Any]) -> tuple[list[tuple[Leaf, int]], tuple[int, ...]]:
    kinds: list[tuple[Leaf, int]] = []
    nesting: list[int] = []
    for layer, cache in enumerate(caches):
        if type(cache) is CacheList:
            nesting.append(len(cache.caches))
            kinds += [_kind(layer, inner) for inner in cache.caches]
        else:
            nesting.append(0)
            kinds.append(_kind(layer, cache))
    return kinds, tuple(nesting)


def _kind(layer: int, cache: Any) -> tuple[Leaf, int]:
    if type(cache) is KVCache:
        return Leaf(layer, Component.ATTENTION), 0
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return Leaf(layer, Component.WINDOW, window=cache.max_size), 0
    if type(cache) is ArraysCache:
        return Leaf(layer, Component.STATE), len(cache.cache)
    what = type(cache).__name__
    if type(cache) is RotatingKVCache:
        what += f" that keeps its first {cache.keep} tokens"
    raise UnsupportedLayout(f"layer {layer} keeps a {what}, a kind of cache Pippin does not know")


def _with_shapes(leaf: Leaf, view: Any) -> Leaf:
    if leaf.is_state:
        entries = [entry for entry in view.cache if entry is not None]
        if len(entries) != len(view.cache):
            raise UnsupportedLayout(f"layer {leaf.layer} leaves part of its recurrent state empty")
        shapes = tuple(tuple(entry.shape[1:]) for entry in entries)
        return Leaf(
            leaf.layer, leaf.component, None, shapes, tuple(entry.dtype for entry in entries)
        )
    if view.keys is None:
        raise UnsupportedLayout(f"layer {leaf.layer} does not use the KV cache it declares")
    shapes = tuple((array.shape[1], array.shape[3]) for array in (view.keys, view.values))
    dtypes = (view.keys.dtype, view.values.dtype)
    return Leaf(leaf.layer, leaf.component, leaf.window, shapes, dtypes, view.splits)
