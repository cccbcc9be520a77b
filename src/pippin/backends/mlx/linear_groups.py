"""Linear layers that read the same input: seen, not listed, as they are called with the very same
array. On CPUs cpu/layers.py makes one operation of them; on GPUs they are one product.

A decode step is hundreds of small operations, and launching one costs more than its arithmetic: the
queries, keys and values of a layer are one product of a taller matrix while rows are few. Their
weights become slices of one matrix, so nothing is stored twice, and a prompt's chunk still takes
each product by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

STACKED = ("weight", "scales", "biases", "bias")  # parameters with a line for every output
_KINDS = (Linear, QuantizedLinear)


class SharedResults:
    """What the layers of one input make of it: the first that is called computes all of them.

    `compute(x)`: the results of all layers, in order.
    """

    def __init__(self, compute: Callable[[mx.array], Sequence[mx.array]]) -> None:
        self._compute = compute
        self._input: mx.array | None = None
        self._results: dict[int, mx.array] = {}

    def of(self, number: int, x: mx.array) -> mx.array:
        """What layer `number` makes of `x`."""
        if self._input is not x or number not in self._results:
            self._input = x
            self._results = dict(enumerate(self._compute(x)))
        result = self._results.pop(number)
        if not self._results:
            self._input = None  # no other layer will ask: keep nothing alive
        return result


def find_linear_groups(model: Module, forward: Callable[[], object]) -> list[list[Module]]:
    """Run `forward` once; layers of one kind and type that are given the same array, in order."""
    # By the array's id; the array is kept, so that no other gets its id.
    readers: dict[int, tuple[mx.array, list[Module]]] = {}
    parts = [part for _, part in model.named_modules() if type(part) in _KINDS]
    original = {id(part): type(part) for part in parts}
    for part in parts:
        _watch(part, readers)
    try:
        forward()
    finally:
        for part in parts:
            part.__class__ = original[id(part)]
    groups: list[list[Module]] = []
    for _, read in readers.values():
        alike: dict[object, list[Module]] = {}
        for part in read:
            alike.setdefault(likeness(part), []).append(part)
        groups += [group for group in alike.values() if 1 < len(group) == len(set(map(id, group)))]
    return groups


def _watch(part: Module, readers: dict[int, tuple[mx.array, list[Module]]]) -> None:
    cls = type(part)

    def call(self: Any, x: mx.array) -> mx.array:
        readers.setdefault(id(x), (x, []))[1].append(self)
        y: mx.array = cls.__call__(self, x)
        return y

    part.__class__ = type(cls.__name__, (cls,), {"__call__": call})


def likeness(part: Module) -> object:
    """Layers that differ in it cannot be stacked: all but how many outputs they have."""
    arrays = {name: part.get(name) for name in STACKED}
    shapes = {n: None if a is None else (a.dtype, a.shape[1:]) for n, a in arrays.items()}
    settings = tuple(getattr(part, name, None) for name in ("group_size", "bits", "mode"))
    return type(part), settings, tuple(shapes.items())


FEW_ROWS = 256  # of one forward; past it products are large, and slices of a wide result cost more


def stack_linear_layers(groups: Iterable[Sequence[Module]]) -> None:
    """Change the layers of each group in place."""
    for parts in groups:
        share_product(parts, stack(parts))


def share_product(parts: Sequence[Any], stacked: Any) -> None:
    """Let layers take what is theirs of the product of them all, while rows are few."""
    ends = np.cumsum([part["weight"].shape[0] for part in parts]).tolist()
    results = SharedResults(lambda x: [*mx.split(stacked(x), ends[:-1], axis=-1)])
    for number, part in enumerate(parts):
        _share(part, results, number)


def stack(parts: Sequence[Any], axis: int = 0) -> Any:
    """A layer like them, with the lines of all; theirs become slices of its own."""
    stacked = copy(parts[0])
    for name in STACKED:
        if parts[0].get(name) is not None:
            stacked[name] = mx.concatenate([part[name] for part in parts], axis=axis)
            mx.eval(stacked[name])
            ends = np.cumsum([part[name].shape[axis] for part in parts]).tolist()
            slices = mx.split(stacked[name], ends[:-1], axis=axis)
            for part, own in zip(parts, slices, strict=True):
                part[name] = own
    mx.eval([part.parameters() for part in parts])
    return stacked


def _share(part: Module, results: SharedResults, number: int) -> None:
    cls = type(part)

    def call(self: Any, x: mx.array) -> mx.array:
        if x.size // x.shape[-1] > FEW_ROWS:
            y: mx.array = cls.__call__(self, x)
            return y
        return results.of(number, x)

    part.__class__ = type(cls.__name__, (cls,), {"__call__": call})
