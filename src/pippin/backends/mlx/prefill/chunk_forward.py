"""One forward of chunks: plain, or as a function of arrays that is compiled once for each shape.

On GPUs a forward costs what its graph costs to build and to launch, however short its chunks are.
Compiled it is built once, and its small operations are fused. Lengths come from a ladder there
(shapes.py), so shapes come again. Knows no prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from pippin.backends.mlx.load import LoadedModel
from pippin.backends.mlx.prefill.batch import ChunkBatch, ChunkKV, ChunkMasks, PrefixLens
from pippin.backends.mlx.recurrent.state_taps import StateTaps

MAX_COMPILED = 128  # shapes

Tree = dict[str, Any]


@dataclass(frozen=True)
class ChunkShape:
    """What the host knows of a forward and its graph depends on."""

    num_rows: int
    width: int
    ragged: bool
    prefixes: tuple[tuple[int, bool], ...]  # by window class: columns, and whether all are filled
    states: bool  # somebody has some
    taps: bool

    @classmethod
    def of(cls, batch: ChunkBatch, *, taps: bool) -> ChunkShape:
        held = (view.cache[0] for view in batch.views if isinstance(view, ArraysCache))
        return cls(
            len(batch.lens),
            batch.width,
            batch.ragged,
            tuple((before.columns, before.even) for before in batch.prefix_lens),
            any(entry is not None for entry in held),
            taps,
        )


@dataclass(frozen=True)
class ChunkResult:
    logits: mx.array
    hidden: mx.array | None  # what the head read
    tapped: StateTaps | None


class ChunkForward:
    def __init__(self, loaded: LoadedModel, *, compiled: bool) -> None:
        self._loaded = loaded
        self.compiles = compiled
        self._compiled: OrderedDict[ChunkShape, CompiledChunks] = OrderedDict()

    def __call__(self, batch: ChunkBatch, positions: mx.array | None, *, taps: bool) -> ChunkResult:
        """`positions` int32 [rows, 1]: those that logits are wanted of; None: all."""
        if positions is None or not self.compiles:
            return run(self._loaded, batch.tokens, batch.caches, positions, taps=taps)
        return self._compiled_for(ChunkShape.of(batch, taps=taps))(batch, positions)

    def _compiled_for(self, shape: ChunkShape) -> CompiledChunks:
        if shape not in self._compiled:
            self._compiled[shape] = CompiledChunks(self._loaded, shape)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(shape)
        return self._compiled[shape]


def run(
    loaded: LoadedModel,
    tokens: mx.array,
    caches: list[Any],
    positions: mx.array | None,
    *,
    taps: bool,
) -> ChunkResult:
    loaded.head.positions = positions
    with StateTaps(loaded.layout) if taps else nullcontext() as tapped:
        logits = loaded.forward(tokens, caches)
    loaded.head.positions = None
    return ChunkResult(logits, loaded.take_hidden(), tapped)


class CompiledChunks:
    """The forward of one shape. Of the batches that it runs it keeps nothing but that."""

    def __init__(self, loaded: LoadedModel, shape: ChunkShape) -> None:
        self._loaded = loaded
        self._shape = shape
        self._block_types: list[type[list[mx.array]]] = []  # how a layer's states lie in memory
        self._forward: Callable[[Tree], Tree] = mx.compile(self._run)

    def __call__(self, batch: ChunkBatch, positions: mx.array) -> ChunkResult:
        made = self._forward(_tree(batch, positions))
        kv, states = iter(made["kv"]), iter(made["states"])
        for view in batch.views:
            if isinstance(view, ChunkKV):
                view.new = next(kv)
            else:
                view.cache = list(next(states))
        tapped = None
        if self._shape.taps:
            blocks = [kind(of) for kind, of in zip(self._block_types, made["blocks"], strict=True)]
            tapped = StateTaps.of(self._loaded.layout, blocks, list(made["convs"]))
        return ChunkResult(made["logits"], made.get("hidden"), tapped)

    def _run(self, tree: Tree) -> Tree:
        views = self._views(tree)
        caches = self._loaded.layout.nest(views)
        taps = self._shape.taps
        result = run(self._loaded, tree["tokens"], caches, tree["positions"], taps=taps)
        made: Tree = {
            "logits": result.logits,
            "kv": [view.new for view in views if isinstance(view, ChunkKV)],
            "states": [list(view.cache) for view in views if isinstance(view, ArraysCache)],
        }
        if result.hidden is not None:
            made["hidden"] = result.hidden
        if result.tapped is not None:
            blocks, made["convs"] = result.tapped.recorded
            self._block_types = [type(layer) for layer in blocks]
            made["blocks"] = [list(layer) for layer in blocks]
        return made

    def _views(self, tree: Tree) -> list[Any]:
        layout, shape = self._loaded.layout, self._shape
        masks = ChunkMasks(shape.width)
        before = [
            PrefixLens(place, lens, *shape.prefixes[place])
            for place, lens in enumerate(tree["before"])
        ]
        prefixes, states = iter(tree["prefixes"]), iter(tree["states"])
        views: list[Any] = []
        for leaf in layout.leaves:
            if leaf.is_state:
                view: Any = ArraysCache(size=len(leaf.shapes))
                view.cache = list(next(states)) if shape.states else [None] * len(leaf.shapes)
                if shape.ragged:
                    view.lengths = mx.array(tree["lens"])  # counted down, each by its layer
                views.append(view)
                continue
            lens = before[layout.window_classes.index(leaf.window)]
            prefix = tuple(next(prefixes)) if lens.columns else None
            views.append(ChunkKV(leaf, tree["offset"], masks, prefix, lens))
        return views


def _tree(batch: ChunkBatch, positions: mx.array) -> Tree:
    """All arrays of a batch, and its numbers as arrays."""
    views = batch.views
    kv = [view.prefix for view in views if isinstance(view, ChunkKV)]
    states = [view.cache for view in views if isinstance(view, ArraysCache)]
    return {
        "tokens": batch.tokens,
        "positions": positions,
        "lens": mx.array(batch.lens),
        "offset": batch.offsets,
        "before": [mx.array(before.lens) for before in batch.prefix_lens],
        "prefixes": [list(prefix) for prefix in kv if prefix is not None],
        "states": [entries for entries in states if entries[0] is not None],
    }
