"""What a recurrent layer keeps in a step that verifies drafts, and how it is folded in later.

The state behind the input token is written, which is always accepted. Of the drafts behind it their
inputs are kept: the next step runs first those that were accepted, and so does what captures the
row. No state per draft. Knows no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from pippin.backends.mlx.layout import LayerCache


class DraftStates(ArraysCache):
    """A layer's state entries, before and after the step, and what is kept of drafts."""

    def __init__(self, cache: LayerCache, entries: Sequence[mx.array], counts: mx.array) -> None:
        num_entries = len(cache.shapes)
        super().__init__(size=num_entries)
        self.cache: Any = list(entries[:num_entries])
        self.kept = list(entries[num_entries:])  # as `kept_shapes` has them
        self.counts = counts  # int32 [rows]: how many of these were accepted

    def entries(self) -> list[mx.array]:
        return [*self.cache, *self.kept]


def kept_shapes(cache: LayerCache, max_depth: int) -> list[tuple[int, ...]]:
    """Of a Gated DeltaNet layer, per row: inputs of the convolution and of the gates."""
    if not max_depth:
        return []
    (_, channels), (heads, *_) = cache.shapes
    return [(max_depth, channels), (max_depth, heads), (max_depth, heads)]


def kept_bytes(cache: LayerCache, max_depth: int) -> int:
    """All are float32."""
    return sum(4 * depth * size for depth, size in kept_shapes(cache, max_depth))
