"""Linear layers with weights that are packed once, when the model is loaded.

Those that read the same input are one operation.

OpenBLAS packs weights anew for every product, which for the few rows of a decode step or of a chunk
beside streams takes as long as the product itself (panels.h).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from pippin.backends.mlx.cpu.operations.calls import (
    LinearLayers,
    LinearWeights,
    Operations,
    are_float32,
    narrowed,
    operations,
)

EMBEDDINGS = ("embed_tokens", "embeddings", "wte")


class PackedLinear(Linear):
    """mlx's layer, made over in place by `pack_linear_layers`."""

    _num_outputs: int
    _siblings: PackedSiblings

    def __call__(self, x: mx.array) -> mx.array:
        ours = operations("linear")
        if ours is None or not x.size or not are_float32(x) or "weight" in self:
            y: mx.array = x @ self.weight.T
            return y + self.bias if "bias" in self else y
        return self._siblings.piece(self, ours, x)

    @property
    def weight(self) -> mx.array:
        """For whoever reads it all the same: unpacked, or what was set since."""
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
        self._siblings.leave(self)

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


class PackedSiblings:
    """The layers of one input: the first that is called computes what the others will be."""

    def __init__(self, parts: Sequence[PackedLinear]) -> None:
        self._parts = list(parts)
        self._layers = LinearLayers([part.packed for part in parts])
        self._input: mx.array | None = None
        self._pieces: dict[int, mx.array] = {}

    def leave(self, part: PackedLinear) -> None:
        self._parts = [other for other in self._parts if other is not part]
        self._layers = LinearLayers([other.packed for other in self._parts])

    def piece(self, part: PackedLinear, ours: Operations, x: mx.array) -> mx.array:
        if self._input is not x or id(part) not in self._pieces:
            self._input = x
            pieces = ours.linear(x, self._layers)
            self._pieces = dict(zip(map(id, self._parts), pieces, strict=True))
        piece = self._pieces.pop(id(part))
        if not self._pieces:
            self._input = None  # nobody else will ask: hold nothing
        return piece


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
        """For whoever reads it all the same."""
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


def pack_linear_layers(model: Module, siblings: Iterable[Sequence[Module]] = ()) -> None:
    """`siblings`: groups of layers that read the same input, each in one group at most."""
    ours = operations("linear")
    if ours is None:
        return
    groups = [*siblings]
    with_others = {id(part) for group in groups for part in group}
    groups += [[part] for _, part in model.named_modules() if id(part) not in with_others]
    for group in groups:
        parts = [PackedLinear.of(part, ours) for part in group if _can_be_packed(part)]
        together = PackedSiblings(parts)
        for part in parts:
            part._siblings = together


def _can_be_packed(part: Module) -> bool:
    return type(part) is Linear and are_float32(*part.parameters().values())
