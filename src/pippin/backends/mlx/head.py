"""The language-model head: computes only what is asked for, also without the layers below it.

Knows no sampling and no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from pippin.backends.mlx.cpu.layers import EMBEDDINGS

_NAMES = ("lm_head", *EMBEDDINGS)


class Head:
    """Stands between a model's layers and its language-model head.

    `select` is applied to the hidden states [rows, tokens, hidden] right before the head. Where no
    head is known by its name, all positions are computed: right, slower.
    """

    def __init__(self, model: Module) -> None:
        self.positions: mx.array | None = None  # int32 [rows, n], or None for every position
        self.dtype: mx.Dtype | None = None  # of what it reads, where that was measured
        self._selected: mx.array | None = None  # what the head was given last of `positions`
        self._replayed: mx.array | None = None  # what it is to be given instead
        self._keeps = False  # all that it is given
        heads = [part for name, part in model.named_modules() if name.split(".")[-1] in _NAMES]
        for part in heads:
            _swap(part, self)

    def select(self, hidden: mx.array) -> mx.array:
        if self._replayed is not None:
            return self._replayed
        if self._keeps:
            self._selected = hidden
        if self.positions is None or hidden.ndim != 3:
            return hidden
        self._selected = mx.take_along_axis(hidden, self.positions[:, :, None], axis=1)
        return self._selected

    def take_selected(self) -> mx.array | None:
        """The hidden vectors [rows, n, hidden] of the last forward's `positions`; None where no
        head is known. They are handed out once: to keep them would keep that forward alive."""
        selected, self._selected = self._selected, None
        return selected

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside, `take_selected` has the hidden vectors of every position."""
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False

    @contextmanager
    def replaying(self, hidden: mx.array) -> Iterator[None]:
        """In a forward inside, the head reads `hidden` and not what the layers made.

        Nothing depends on the layers then, so they are built into no graph and never computed;
        what a model does to its logits behind the head is done to these as well.
        """
        self._replayed = hidden
        try:
            yield
        finally:
            self._replayed = None


def measure_hidden(head: Head, forward: Callable[[], mx.array]) -> int:
    """The bytes of one hidden vector, tried on `forward` of one token; 0 where the head is not
    known, or hidden vectors alone do not give the logits."""
    head.positions = mx.zeros((1, 1), mx.int32)
    logits = forward()
    head.positions = None
    hidden = head.take_selected()
    if hidden is None:
        return 0
    head.dtype = hidden.dtype
    with head.replaying(hidden):
        again = forward()
    return int(hidden.nbytes) if mx.allclose(again, logits).item() else 0


def _swap(part: Module, head: Head) -> None:
    cls = type(part)
    name = "as_linear" if hasattr(part, "as_linear") else "__call__"
    if name == "__call__" and not isinstance(part, Linear | QuantizedLinear):
        return

    def of_selected(self: Any, x: mx.array) -> mx.array:
        logits: mx.array = getattr(cls, name)(self, head.select(x))
        return logits

    part.__class__ = type(cls.__name__, (cls,), {name: of_selected})
