"""A second, smaller model of the same tokenizer, as a drafter reads with it.

It reads tokens alone. Of each slot it keeps keys of the last tokens, and of the first ones that it
was fed: models without a window attend to those whatever follows, and do badly without.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from pippin.backends.mlx.drafts.rings import RingKV, RingLayer, RingShape
from pippin.backends.mlx.load import LoadedModel, load
from pippin.backends.sampling.rules import FAR
from pippin.backends.step.drafts import LENGTH, NUM_FIRST
from pippin.errors import LoadError


class DraftModel:
    def __init__(self, loaded: LoadedModel, vocab_size: int, length: int = LENGTH) -> None:
        """`vocab_size`: of the model that verifies."""
        self.loaded = loaded
        self.vocab_size = vocab_size
        self._length = length

    @property
    def longest(self) -> int:
        """Tokens of a text that it is fed at once."""
        return self._length // 2

    @property
    def operation(self) -> None:
        """It runs as any model does."""

    def ring_shape(self, max_depth: int) -> RingShape:
        layers = [
            RingLayer(_heads(own.shapes[0]), _heads(own.shapes[1]), own.dtypes[0], own.window)
            for own in self.loaded.layout.caches
        ]
        return RingShape(tuple(layers), self._length, NUM_FIRST, num_wrong=max_depth)

    def read(
        self,
        hidden: mx.array | None,
        tokens: mx.array,
        caches: Sequence[RingKV],
        at: mx.array,
    ) -> tuple[mx.array, None]:
        own = self.loaded
        tokens = mx.minimum(tokens, own.vocab_size - 1)
        own.head.positions = at[:, None]
        try:
            logits = own.forward(tokens, own.layout.nest(caches))
        finally:
            own.head.positions = None
            own.head.take_selected()
        if logits.shape[1] > 1:  # of a model whose head is not known by its name
            logits = mx.take_along_axis(logits, at[:, None, None], axis=1)
        missing = self.vocab_size - own.vocab_size
        found = logits[:, 0, : self.vocab_size]
        return mx.pad(found, [(0, 0), (0, max(missing, 0))], constant_values=-FAR), None


def _heads(shape: tuple[int, ...]) -> tuple[int, int]:
    heads, channels = shape
    return heads, channels


def load_draft_model(path: Path, dtype: str, *, safe: bool) -> LoadedModel:
    """Refuses what a drafter cannot feed."""
    loaded = load(path, dtype=dtype, safe=safe)
    layout = loaded.layout
    if layout.state_indices or not layout.packs:
        kind = "recurrent states" if layout.state_indices else "layers that attend in their own way"
        raise LoadError(
            f"draft_model: {path.name} has {kind}, and a draft model has plain attention alone: "
            "use another one, or --speculate mtp or suffix"
        )
    return loaded
