"""What a recurrent layer keeps in a step that verifies drafts, and how it is folded in later.

The state behind the input token is written, which is always accepted. Of the drafts behind it their
inputs are kept: the next step runs first those that were accepted, and so does what captures the
row. No state per draft. Knows no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from pippin.backends.mlx.layout import LayerCache


class Replay:
    """Which of the kept drafts a step runs first, and where, for all layers."""

    def __init__(self, counts: mx.array, num_kept: int, num_new: int) -> None:
        """`counts` int32 [rows]: how many of `num_kept` were accepted; `num_new` tokens follow."""
        self.counts = counts
        self._missing = (num_kept - counts)[:, None]
        self._num_kept, self._num_new = num_kept, num_new
        self._orders: dict[int, mx.array] = {}

    def moved(self, parts: Sequence[mx.array]) -> mx.array:
        """Parts [rows, n, ...] side by side: what is kept, new ones, and perhaps some before. The
        accepted of the kept ones, and those before, are moved next to the new ones."""
        joined = mx.concatenate(list(parts), axis=1)
        size, num_old = joined.shape[1], joined.shape[1] - self._num_new
        if size not in self._orders:
            place = mx.arange(size)[None]
            moved = mx.maximum(place - self._missing, 0)
            self._orders[size] = mx.where(place < num_old, moved, place)[..., None]
        return mx.take_along_axis(joined, self._orders[size], axis=1)

    @cached_property
    def is_replayed(self) -> mx.array:
        """bool [rows, kept and new]: accepted, or the input token."""
        return (self._place >= self._missing) & (self._place <= self._num_kept)

    @cached_property
    def is_draft(self) -> mx.array:
        is_draft = mx.broadcast_to(self._place > self._num_kept, self.is_replayed.shape)
        return mx.contiguous(is_draft)

    @cached_property
    def _place(self) -> mx.array:
        return mx.arange(self._num_kept + self._num_new)[None]


class DraftStates(ArraysCache):
    """A layer's state entries, before and after the step, and what is kept of drafts."""

    def __init__(self, cache: LayerCache, entries: Sequence[mx.array], replay: Replay) -> None:
        num_entries = len(cache.shapes)
        super().__init__(size=num_entries)
        self.cache: Any = list(entries[:num_entries])
        self.kept = list(entries[num_entries:])  # as `kept_shapes` has them
        self.replay = replay

    def entries(self) -> list[mx.array]:
        return [*self.cache, *self.kept]


def kept_shapes(cache: LayerCache, max_depth: int) -> list[tuple[int, ...]]:
    """Of a Gated DeltaNet layer, per row: inputs of the convolution and of the gates."""
    if not max_depth:
        return []
    (_, channels), (heads, *_) = cache.shapes
    return [(max_depth, channels), (max_depth, heads), (max_depth, heads)]


def kept_bytes(cache: LayerCache, max_depth: int) -> int:
    """Of the type of the convolution's state."""
    return sum(cache.dtypes[0].size * depth * size for depth, size in kept_shapes(cache, max_depth))
