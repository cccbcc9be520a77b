"""Runs ragged rows through a model once at load, never evaluated: what cannot work fails here.

mlx-lm's models differ in how they attend: some lend one layer's KV to others, some need every row
at the same position. A graph that cannot be built says so now, not in a user's first request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.prefill import ChunkBatch, PromptState
from pippin.backends.mlx.rows import DecodeRows
from pippin.errors import UnsupportedLayout

Forward = Callable[[mx.array, list[Any]], mx.array]


def rehearsed(layout: Layout, forward: Forward) -> Layout:
    """The layout as this model can run it: main and tail apart, else joined, else refused."""
    joined = replace(layout, leaves=tuple(replace(leaf, splits=False) for leaf in layout.leaves))
    failure: Exception | None = None
    for candidate in (layout, joined) if layout.splits else (joined,):
        try:
            _rehearse(candidate, forward)
        except Exception as error:  # whatever the model's own code raises, reported below
            failure = error
        else:
            return candidate
    raise UnsupportedLayout(
        f"the model cannot run rows of different lengths in one forward: {failure}"
    ) from failure


def _rehearse(layout: Layout, forward: Forward) -> None:
    prompts = [PromptState(), PromptState()]
    for lens in ((2, 3), (3, 1)):  # ragged, and then with prefixes of two lengths
        chunks = [np.zeros(n, dtype=np.int32) for n in lens]
        batch = ChunkBatch(layout, chunks, prompts)
        forward(batch.tokens, batch.caches)
        batch.advance()
    rows = DecodeRows(layout)
    rows.join(list(enumerate(prompts, start=1)))
    step = rows.begin([1, 2])
    forward(mx.zeros((2, 1), dtype=mx.int32), step.caches)
    rows.end(step)
