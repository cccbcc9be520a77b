"""The language-model head, made to compute only the positions that are asked for."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

_NAMES = ("lm_head", "embed_tokens", "embeddings", "wte")


class Head:
    """Makes the language-model head compute chosen positions only.

    `select` is applied to the hidden states [rows, tokens, hidden] right before the head. Where no
    head is known by its name, all positions are computed: right, slower.
    """

    def __init__(self, model: Module) -> None:
        self.positions: mx.array | None = None  # int32 [rows, n], or None for every position
        heads = [part for name, part in model.named_modules() if name.split(".")[-1] in _NAMES]
        for part in heads:
            _swap(part, self)

    def select(self, hidden: mx.array) -> mx.array:
        if self.positions is None or hidden.ndim != 3:
            return hidden
        return mx.take_along_axis(hidden, self.positions[:, :, None], axis=1)


def _swap(part: Module, head: Head) -> None:
    cls = type(part)
    if hasattr(part, "as_linear"):

        def as_linear(self: Any, x: mx.array) -> mx.array:
            logits: mx.array = super(type(self), self).as_linear(head.select(x))
            return logits

        part.__class__ = type(cls.__name__, (cls,), {"as_linear": as_linear})
    elif isinstance(part, Linear | QuantizedLinear):

        def call(self: Any, x: mx.array) -> mx.array:
            logits: mx.array = super(type(self), self).__call__(head.select(x))
            return logits

        part.__class__ = type(cls.__name__, (cls,), {"__call__": call})
