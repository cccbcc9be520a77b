"""What each layer of a model keeps, read from the model's own cache objects.

A layer's cache may be several caches in one (CacheList); each plain one is a `LayerCache`. The
first layer is not special. An unknown kind is an error at load, never a wrong answer.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from pippin.errors import UnsupportedLayout
from pippin.types import Component, LayerSpec

ROUNDING = 0.02  # of bfloat16 through many layers; what is of another kind is off by far more


class Reads(enum.Enum):
    """How a layer reads its KV in a decode step."""

    PIECES = "pieces"  # through mlx-lm's function: main and tail stay apart
    LATENT = "latent"  # so too, with a latent for keys and values and positions beside it (MLA)
    JOINED = "joined"  # in its own way: main and tail are concatenated for it


@dataclass(frozen=True)
class LayerCache:
    """One plain cache of one layer."""

    layer: int
    component: Component
    window: int | None = None
    # KV: the shapes of one token's keys and values, (heads, dim). State: of each entry, per row.
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[mx.Dtype, ...] = ()
    reads: Reads = Reads.JOINED
    # The window does not slide: a token sees those since the last multiple of `window`, a chunk.
    chunked: bool = False

    @property
    def nbytes(self) -> int:
        """Per token for KV, per sequence for a state."""
        entries = zip(self.shapes, self.dtypes, strict=True)
        return sum(prod(shape) * dtype.size for shape, dtype in entries)

    def kept(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """What is kept of KV: keys that are values too (of an indexer) are kept once."""
        return keys, values if values.shape[-1] == self.shapes[1][-1] else values[..., :0]

    @property
    def is_state(self) -> bool:
        return self.component is Component.STATE

    @property
    def splits(self) -> bool:
        """Main and tail stay apart."""
        return self.reads is not Reads.JOINED


class ProbeKV:
    """Stands in for a KV cache in one forward of one token, built to see how a model attends."""

    def __init__(self) -> None:
        self.offset = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.is_one_array = False  # keys and values are
        self.added: mx.array | None = None  # to the scores, by a layer with latent attention
        self.reads = Reads.JOINED

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys, self.values = keys, values
        self.is_one_array = keys is values
        self.offset += keys.shape[2]
        return keys, values

    def keys_and_values(self) -> tuple[mx.array | None, mx.array | None]:
        """For a layer that reads what another one keeps."""
        return self.keys, self.values

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def seen_by_attention(self, keys: Any, values: Any, mask: Any) -> Any:
        """Called by the substituted attention function; returns the mask to go on with."""
        if keys is self.keys and values is self.values and mask is None:
            self.reads = Reads.PIECES
        elif keys is self.keys and values is self.keys and isinstance(mask, mx.array):
            self.reads, self.added = Reads.LATENT, mask
        return mask


class LatentProbeKV(ProbeKV):
    """Hands out an identity for the positions of keys: what is added are then the queries' own."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        super().update_and_fetch(keys, values)
        return keys, mx.eye(values.shape[-1], dtype=values.dtype)[None, None]

    def seen_by_attention(self, keys: Any, values: Any, mask: Any) -> None:
        """No mask to go on with: whatever is added to the score of an only key changes nothing."""
        super().seen_by_attention(keys, values, mask)

    def agrees_with(self, plain: ProbeKV) -> bool:
        """Whether the queries found here make of the keys what the model itself added."""
        if self.added is None or plain.added is None or plain.values is None:
            return False
        if self.added.shape != (*plain.added.shape[:3], plain.values.shape[-1]):
            return False
        positions = plain.values.swapaxes(-1, -2)
        size = mx.abs(self.added) @ mx.abs(positions)
        error = mx.abs(self.added @ positions - plain.added)
        return bool((error <= ROUNDING * size).all())


@dataclass(frozen=True)
class Layout:
    """Caches in order, and how they nest back into what the model is called with."""

    caches: tuple[LayerCache, ...]
    nesting: tuple[int, ...]  # of each layer; 0: a plain cache, n: a CacheList of n
    pads: bool = True  # recurrent layers pass over padding: uneven chunks can share a forward
    # Layers that attend in their own way have scores [rows, KV heads, queries of one, ...], and the
    # mask has an axis more, too.
    groups_heads: bool = False
    compiles: bool = True  # no layer reads values back in the middle of a forward

    def nest(self, views: Sequence[Any]) -> list[Any]:
        """One view per cache, arranged as the model expects its `cache` argument."""
        rest = iter(views)
        return [
            CacheList(*(next(rest) for _ in range(count))) if count else next(rest)
            for count in self.nesting
        ]

    @cached_property
    def kv_indices(self) -> tuple[int, ...]:
        return tuple(i for i, cache in enumerate(self.caches) if not cache.is_state)

    @cached_property
    def kv_caches(self) -> tuple[LayerCache, ...]:
        return tuple(self.caches[index] for index in self.kv_indices)

    @cached_property
    def state_indices(self) -> tuple[int, ...]:
        return self.indices(Component.STATE)

    @cached_property
    def window_classes(self) -> tuple[int | None, ...]:
        """The distinct windows of the KV caches; caches of one class store the same tokens."""
        return tuple(dict.fromkeys(cache.window for cache in self.kv_caches))

    def indices(self, component: Component) -> tuple[int, ...]:
        return tuple(i for i, cache in enumerate(self.caches) if cache.component is component)

    @property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        return tuple(
            LayerSpec(cache.layer, cache.component, cache.nbytes, cache.window)
            for cache in self.caches
        )

    @property
    def splits(self) -> bool:
        """Every attention layer reads main and tail apart."""
        return all(cache.splits for cache in self.kv_caches)

    @cached_property
    def fits_table(self) -> bool:
        """One operation can read every attention layer's mains from a list of where they lie."""
        dtypes = {dtype for cache in self.kv_caches for dtype in cache.dtypes}
        return dtypes <= {mx.float32} and self.packs

    @property
    def packs_rows(self) -> bool:
        """Every attention layer can read its mains where those of all rows lie packed."""
        windows = {(cache.window, cache.chunked) for cache in self.kv_caches}
        pieces = all(cache.reads is Reads.PIECES for cache in self.kv_caches)
        one_way = bool(windows) and len(windows) == len(self.window_classes)
        return one_way and (pieces or self.has_latents)

    @property
    def has_latents(self) -> bool:
        """Every attention layer keeps latents."""
        return {cache.reads for cache in self.kv_caches} == {Reads.LATENT}

    @property
    def packs(self) -> bool:
        """And they are keys and values, of which a token sees all or a window that slides."""
        chunked = any(cache.chunked for cache in self.caches)
        return self.packs_rows and not self.has_latents and not chunked

    def reading(self, how: Reads, *, instead_of: Collection[Reads]) -> Layout:
        """The same layers, but those that read their KV in certain ways do it as `how` says."""
        caches = tuple(
            replace(cache, reads=how) if cache.reads in instead_of else cache
            for cache in self.caches
        )
        return replace(self, caches=caches)


def discover(model: Any, forward: Callable[[mx.array, list[Any]], mx.array]) -> Layout:
    """Read the kinds from the model's caches, and the shapes from one unevaluated forward."""
    kinds, nesting = _kinds(make_prompt_cache(model))
    shell = Layout(tuple(cache for cache, _ in kinds), nesting)

    def probe(kv: type[ProbeKV]) -> list[Any]:
        views = [ArraysCache(size=size) if cache.is_state else kv() for cache, size in kinds]
        try:
            forward(mx.zeros((1, 1), dtype=mx.int32), shell.nest(views))
        except Exception as error:  # whatever the model's own code raises
            raise UnsupportedLayout(f"a layer uses its cache in an unknown way: {error}") from error
        return views

    views = probe(ProbeKV)
    caches = tuple(
        _with_shapes(cache, view) for cache, view in zip(shell.caches, views, strict=True)
    )
    layout = Layout(caches, nesting)
    if all(cache.reads is Reads.LATENT for cache in caches if not cache.is_state):
        found = zip(probe(LatentProbeKV), views, strict=True)
        if all(a.agrees_with(b) for a, b in found if isinstance(a, LatentProbeKV)):
            return layout
    # Others beside it would get no mask: a latent layer wants none.
    return layout.reading(Reads.JOINED, instead_of={Reads.LATENT})


def _kinds(caches: Sequence[Any]) -> tuple[list[tuple[LayerCache, int]], tuple[int, ...]]:
    kinds: list[tuple[LayerCache, int]] = []
    nesting: list[int] = []
    for layer, cache in enumerate(caches):
        if type(cache) is CacheList:
            nesting.append(len(cache.caches))
            kinds += [_kind(layer, inner) for inner in cache.caches]
        else:
            nesting.append(0)
            kinds.append(_kind(layer, cache))
    return kinds, tuple(nesting)


def _kind(layer: int, cache: Any) -> tuple[LayerCache, int]:
    if type(cache) is KVCache:
        return LayerCache(layer, Component.ATTENTION), 0
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return LayerCache(layer, Component.WINDOW, window=cache.max_size), 0
    if type(cache) is ChunkedKVCache:
        return LayerCache(layer, Component.WINDOW, window=cache.chunk_size, chunked=True), 0
    if type(cache) is ArraysCache:
        return LayerCache(layer, Component.STATE), len(cache.cache)
    what = type(cache).__name__
    if type(cache) is RotatingKVCache:
        what += f" that keeps its first {cache.keep} tokens"
    raise UnsupportedLayout(f"layer {layer} keeps a {what}, a kind of cache Pippin does not know")


def _with_shapes(cache: LayerCache, view: Any) -> LayerCache:
    if cache.is_state:
        entries = [entry for entry in view.cache if entry is not None]
        if len(entries) != len(view.cache):
            raise UnsupportedLayout(f"layer {cache.layer} leaves part of its recurrent state empty")
        shapes = tuple(tuple(entry.shape[1:]) for entry in entries)
        return replace(cache, shapes=shapes, dtypes=tuple(entry.dtype for entry in entries))
    if view.keys is None:
        raise UnsupportedLayout(f"layer {cache.layer} does not use the KV cache it declares")
    sides = (view.keys, view.keys[..., :0] if view.is_one_array else view.values)
    shapes = tuple((side.shape[1], side.shape[3]) for side in sides)
    dtypes = (view.keys.dtype, view.values.dtype)
    return replace(cache, shapes=shapes, dtypes=dtypes, reads=view.reads)
