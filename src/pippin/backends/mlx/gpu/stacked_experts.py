"""Experts whose two products of one input are computed as one. Knows no model.

As stacked_linear.py does it for layers without experts; but slices of stacked experts do not lie in
one piece, so a prompt's chunk takes both at once, too. The layers' own weights become such slices,
and nothing is stored twice.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.switch_layers import (
    QuantizedSwitchLinear,
    SwitchGLU,
    SwitchLinear,
    _gather_sort,
    _scatter_unsort,
)

STACKED = ("weight", "scales", "biases", "bias")  # parameters with a line for every output
FEWEST_SORTED = 64  # experts of all tokens: mlx-lm sorts so many, and rows by them


class StackedGLU(SwitchGLU):
    """mlx-lm's layer, made over in place by `stack_experts`."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        x = mx.expand_dims(x, (-2, -3))
        is_sorted = indices.size >= FEWEST_SORTED
        chosen, inverse = indices, None
        if is_sorted:
            x, chosen, inverse = _gather_sort(x, indices)
        both = self._both(x, chosen, sorted_indices=is_sorted)
        linear, gate = mx.split(both, 2, axis=-1)
        x = self.down_proj(self.activation(linear, gate), chosen, sorted_indices=is_sorted)
        if is_sorted:
            x = _scatter_unsort(x, inverse, indices.shape)
        return x.squeeze(-2)


def stack_experts(model: Module) -> None:
    """Change its layers in place."""
    for _, part in model.named_modules():
        if type(part) is SwitchGLU and _likeness(part.up_proj) == _likeness(part.gate_proj):
            _stack(part)
            mx.clear_cache()  # of what was stacked: layers of experts are most of a model


def without_bias(part: Any) -> Any:
    """The same product, where something else adds the bias."""
    product = copy(part)
    product.pop("bias", None)
    return product


def _likeness(part: Any) -> object:
    """Layers that differ in it cannot be stacked."""
    known = type(part) in (SwitchLinear, QuantizedSwitchLinear)
    if not known or part.get("global_scale") is not None:
        return part  # is like no other one
    arrays = {name: part.get(name) for name in STACKED}
    shapes = {name: None if a is None else (a.dtype, a.shape) for name, a in arrays.items()}
    settings = tuple(getattr(part, name, None) for name in ("group_size", "bits", "mode"))
    return type(part), settings, tuple(shapes.items())


def _stack(layer: Any) -> None:
    parts = layer.up_proj, layer.gate_proj
    both = copy(parts[0])  # a layer like them, with the lines of both
    for name in STACKED:
        if parts[0].get(name) is not None:
            both[name] = mx.concatenate([part[name] for part in parts], axis=1)
            mx.eval(both[name])
            for part, half in zip(parts, mx.split(both[name], 2, axis=1), strict=True):
                part[name] = half
    mx.eval([part.parameters() for part in parts])
    # In functions: a module in it would be one of the model's.
    layer._both = lambda x, chosen, **options: both(x, chosen, **options)
    split = without_bias(both), both.get("bias"), without_bias(layer.down_proj)
    layer._without_biases = lambda: split
    layer.__class__ = StackedGLU
