"""Linear layers with weights that are packed once, when the model is loaded.

Those that read the same input are one operation.

OpenBLAS packs weights anew for every product, which for the few rows of a decode step or of a chunk
beside streams takes as long as the product itself (panels.h).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from pippin.backends.mlx.cpu.operations.bindings import (
    LinearLayers,
    LinearWeights,
    Operations,
    are_float32,
    narrowed,
    operations,
)
from pippin.backends.mlx.linear_groups import SharedResults

EMBEDDINGS = ("embed_tokens", "embeddings", "wte")


class PackedLinear(Linear):
    """mlx's layer, made over in place by `pack_linear_layers`."""

    _num_outputs: int
    _results: SharedResults
    _number: int  # among the layers of its input

    def __call__(self, x: mx.array) -> mx.array:
        ours = operations("linear")
        if ours is None or not x.size or not are_float32(x) or "weight" in self:
            y: mx.array = x @ self.weight.T
            return y + self.bias if "bias" in self else y
        return self._results.of(self._number, x)

    @property
    def weight(self) -> mx.array:
        """For code that reads it: unpacked, or what was set since."""
        if "weight" in self:
            set_since: mx.array = self["weight"]
            return set_since
        panels: mx.array = self.panels
        num_inputs = panels.shape[1]
        lines = panels.transpose(0, 2, 1).reshape(-1, num_inputs)[: self._num_outputs]
        return lines.astype(mx.float32)

    @weight.deleter
    def weight(self) -> None:
        """mlx's modules do that before an attribute is set anew."""
        del self.panels

    @property
    def packed(self) -> LinearWeights:
        return LinearWeights(self.panels, self.get("bias"), self._num_outputs)

    @staticmethod
    def of(part: Module, ours: Operations) -> PackedLinear:
        """The layer itself, packed."""
        weight = part.pop("weight")
        part.__class__ = PackedLinear
        assert isinstance(part, PackedLinear)
        part._num_outputs = weight.shape[0]
        part.panels = ours.pack(weight)
        mx.eval(part.panels)  # one layer at a time is there twice
        return part


class PackedEmbedding(Embedding):
    """mlx's layer where it is the head too, made over in place by `pack_head`."""

    def __call__(self, x: mx.array) -> mx.array:
        vectors: mx.array = self.lines[x]
        return vectors.astype(mx.float32)

    def as_linear(self, x: mx.array) -> mx.array:
        ours = operations("linear")
        if ours is None or not x.size or not are_float32(x):
            return x @ self.weight.T
        (logits,) = ours.linear(x, self._layers)
        return logits

    @property
    def weight(self) -> mx.array:  # type: ignore[override]
        """For code that reads it."""
        lines: mx.array = self.lines
        return lines.astype(mx.float32)

    @staticmethod
    def of(part: Module, ours: Operations) -> None:
        weight = part.pop("weight")
        part.__class__ = PackedEmbedding
        part.lines = narrowed(weight)
        part.panels = ours.pack(weight)
        part._layers = LinearLayers([LinearWeights(part.panels, None, weight.shape[0])])
        mx.eval(part.lines, part.panels)


def pack_head(model: Module) -> None:
    """Before anything else stands in its place. A model without one of its own reads its
    embedding."""
    ours = operations("linear")
    if ours is None:
        return
    parts = {name.split(".")[-1]: part for name, part in model.named_modules()}
    if "lm_head" in parts:
        pack_linear_layers(parts["lm_head"])
        return
    for name in EMBEDDINGS:
        part = parts.get(name)
        if type(part) is Embedding and are_float32(part.weight):
            PackedEmbedding.of(part, ours)


def pack_linear_layers(model: Module, groups: Iterable[Sequence[Module]] = ()) -> None:
    """`groups`: of layers that read the same input, each in one group at most."""
    ours = operations("linear")
    if ours is None:
        return
    groups = [*groups]
    grouped = {id(part) for group in groups for part in group}
    groups += [[part] for _, part in model.named_modules() if id(part) not in grouped]
    for group in groups:
        parts = [PackedLinear.of(part, ours) for part in group if _can_be_packed(part)]
        results = SharedResults(
            partial(ours.linear, layers=LinearLayers([p.packed for p in parts]))
        )
        for number, part in enumerate(parts):
            part._results, part._number = results, number


def _can_be_packed(part: Module) -> bool:
    return type(part) is Linear and are_float32(*part.parameters().values())
