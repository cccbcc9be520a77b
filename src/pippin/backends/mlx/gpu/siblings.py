"""Linear layers that read the same input, computed as one product while rows are few.

A decode step is hundreds of small operations, and launching one costs more than its arithmetic: the
queries, keys and values of a layer are one product of a taller matrix. Their weights become slices
of one matrix, so nothing is stored twice, and a prompt's chunk still takes each product by itself.

For GPUs; on CPUs see cpu/operations/linear.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedLinear

from pippin.backends.mlx.siblings import STACKED

FEW_ROWS = 256  # of one forward; past it products are large, and slices of a wide result cost more


class Siblings:
    """The layers of one input, and the results that the ones not yet called will ask for.

    `multiply(parameters, x)` is the product of the stacked layers.
    """

    def __init__(
        self, parts: Sequence[Module], multiply: Callable[[dict[str, mx.array], mx.array], mx.array]
    ) -> None:
        self._multiply = multiply
        sizes = [int(part["weight"].shape[0]) for part in parts]
        ends = np.cumsum(sizes).tolist()
        self._stops = ends[:-1]
        self._stacked = {
            name: mx.concatenate([part[name] for part in parts])
            for name in STACKED
            if parts[0].get(name) is not None
        }
        mx.eval(self._stacked)
        for part, end, size in zip(parts, ends, sizes, strict=True):
            for name, array in self._stacked.items():
                part[name] = array[end - size : end]
        mx.eval([part.parameters() for part in parts])
        self._input: mx.array | None = None
        self._pieces: dict[int, mx.array] = {}

    def piece(self, number: int, x: mx.array) -> mx.array:
        """What layer `number` makes of `x`; the first to ask computes it for all."""
        if self._input is not x or number not in self._pieces:
            self._input = x
            pieces = mx.split(self._multiply(self._stacked, x), self._stops, axis=-1)
            self._pieces = dict(enumerate(pieces))
        piece = self._pieces.pop(number)
        if not self._pieces:
            self._input = None  # nobody else will ask: hold nothing
        return piece


def merge(groups: Iterable[Sequence[Module]]) -> None:
    """Make the layers of each group over in place."""
    for parts in groups:
        siblings = Siblings(parts, _multiply_like(parts[0]))
        for number, part in enumerate(parts):
            _make_sibling(part, siblings, number)


def _make_sibling(part: Module, siblings: Siblings, number: int) -> None:
    cls = type(part)

    def call(self: Any, x: mx.array) -> mx.array:
        if x.size // x.shape[-1] > FEW_ROWS:
            y: mx.array = cls.__call__(self, x)
            return y
        return siblings.piece(number, x)

    part.__class__ = type(cls.__name__, (cls,), {"__call__": call})


def _multiply_like(part: Module) -> Callable[[dict[str, mx.array], mx.array], mx.array]:
    if isinstance(part, QuantizedLinear):
        settings = {"group_size": part.group_size, "bits": part.bits, "mode": part.mode}

        def quantized(p: dict[str, mx.array], x: mx.array) -> mx.array:
            y = mx.quantized_matmul(
                x,
                p["weight"],
                scales=p["scales"],
                biases=p.get("biases"),
                transpose=True,
                **settings,
            )
            return y + p["bias"] if "bias" in p else y

        return quantized
    return lambda p, x: _plus_bias(x @ p["weight"].T, p)


def _plus_bias(y: mx.array, parameters: dict[str, mx.array]) -> mx.array:
    return y + parameters["bias"] if "bias" in parameters else y
