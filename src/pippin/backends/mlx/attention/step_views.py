"""Every layer's view of one decode step. Knows how layers read, not how rows are kept."""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import ArraysCache

from pippin.backends.mlx.attention.decode_step import CohortsShape, DecodeStep
from pippin.backends.mlx.attention.latent_kv import LatentKV
from pippin.backends.mlx.attention.listed_kv import ListedRowKV, ListedShape
from pippin.backends.mlx.attention.packed_kv import PackedRowKV, PackedShape
from pippin.backends.mlx.attention.row_kv import RowKV
from pippin.backends.mlx.layout import Leaf, Reads


class StepViews:
    """Every layer's view of a step, and all of them as the model is called with.

    Not part of the step, which the views hold: a cycle would keep tails, states and mains of past
    steps until Python's cycle collector comes by.
    """

    def __init__(self, step: DecodeStep) -> None:
        leaves, kv_indices = step.layout.leaves, step.layout.kv_indices
        self.kv = [_view(step, leaves[index], place) for place, index in enumerate(kv_indices)]
        self.states: list[Any] = []
        for entries in step.tree["states"]:
            view: Any = ArraysCache(size=len(entries))
            view.cache = list(entries)
            self.states.append(view)
        kv, states = iter(self.kv), iter(self.states)
        self.caches = step.layout.nest([next(states if leaf.is_state else kv) for leaf in leaves])


def _view(step: DecodeStep, leaf: Leaf, place: int) -> RowKV:
    """`place`: of the leaf among the KV leaves."""
    if leaf.reads is Reads.LATENT:
        assert isinstance(step.shape.mains, CohortsShape), "rows with latents are never packed"
        return LatentKV(step, leaf, place)
    views = {PackedShape: PackedRowKV, ListedShape: ListedRowKV, CohortsShape: RowKV}
    return views[type(step.shape.mains)](step, leaf, place)
