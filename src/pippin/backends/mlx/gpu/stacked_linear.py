"""Linear layers that read the same input, computed as one product while rows are few.

A decode step is hundreds of small operations, and launching one costs more than its arithmetic: the
queries, keys and values of a layer are one product of a taller matrix. Their weights become slices
of one matrix, so nothing is stored twice, and a prompt's chunk still takes each product by itself.

For GPUs; on CPUs see cpu/layers.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

from pippin.backends.mlx.linear_groups import STACKED, SharedResults

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
