"""Experts whose two products of one input are computed as one. Knows no model.

As stacked_linear.py does it for layers without experts; but slices of stacked experts do not lie in
one piece, so a prompt's chunk takes both at once, too. An expert that every token has beside those
that are chosen for it is the last of them, where it is like them: its number is that of the experts
before it, which mlx-lm's own code never asks for. The layers' own weights become slices of what is
stacked, and nothing is stored twice.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.models.switch_layers import (
    QuantizedSwitchLinear,
    SwiGLU,
    SwitchGLU,
    SwitchLinear,
    _gather_sort,
    _scatter_unsort,
)

from pippin.backends.mlx.gpu.stacked_linear import share_product, stack
from pippin.backends.mlx.linear_groups import STACKED, likeness

FEWEST_SORTED = 64  # experts of all tokens: mlx-lm sorts so many, and rows by them
LIKE_EXPERTS: dict[type[Any], type[Any]] = {
    Linear: SwitchLinear,
    QuantizedLinear: QuantizedSwitchLinear,
}
PRODUCTS = ("up_proj", "gate_proj", "down_proj")


class StackedGLU(SwitchGLU):
    """mlx-lm's layer, made over in place by `stack_experts`."""

    has_shared: bool  # whether the last expert is every token's

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        x = mx.expand_dims(x, (-2, -3))
        is_sorted = indices.size >= FEWEST_SORTED
        chosen, inverse = indices, None
        if is_sorted:
            x, chosen, inverse = _gather_sort(x, indices)
        both = self._both(x, chosen, sorted_indices=is_sorted)
        linear, gate = mx.split(both, 2, axis=-1)
        x = self._down(self.activation(linear, gate), chosen, sorted_indices=is_sorted)
        if is_sorted:
            x = _scatter_unsort(x, inverse, indices.shape)
        return x.squeeze(-2)


def stack_experts(model: Module) -> None:
    """Change its layers in place."""
    parts = [part for _, part in model.named_modules()]
    shared = {id(part["switch_mlp"]): _shared_of(part) for part in parts if "switch_mlp" in part}
    for part in parts:
        if type(part) is SwitchGLU and _likeness(part.up_proj) == _likeness(part.gate_proj):
            _stack(part, shared.get(id(part)))
            mx.clear_cache()  # of what was stacked: layers of experts are most of a model


def without_bias(part: Any) -> Any:
    """The same product, where something else adds the bias."""
    product = copy(part)
    product.pop("bias", None)
    return product


def _shared_of(layer: Any) -> Any:
    """The expert that every token of the layer has, if it is like the others."""
    glu, shared = layer.switch_mlp, layer.get("shared_expert") or layer.get("shared_experts")
    if shared is None or type(glu.activation) is not SwiGLU:
        return None
    if set(shared.children()) != set(PRODUCTS):
        return None
    alike = all(_likeness(_as_expert(shared[n])) == _likeness(glu[n]) for n in PRODUCTS)
    return shared if alike else None


def _as_expert(part: Any) -> Any:
    """A linear layer as the only one of a layer of experts."""
    one = copy(part)
    one.__class__ = LIKE_EXPERTS.get(type(part), type(part))
    for name in STACKED:
        if part.get(name) is not None:
            one[name] = part[name][None]
    return one


def _likeness(part: Any) -> object:
    """Layers that differ in it cannot be stacked."""
    known = type(part) in LIKE_EXPERTS.values() and part.get("global_scale") is None
    return likeness(part) if known else part  # which is like no other one


def _stack(layer: Any, shared: Any) -> None:
    wholes = {name: layer[name] for name in PRODUCTS}
    if shared is not None:
        wholes = {name: stack([layer[name], _as_expert(shared[name])]) for name in PRODUCTS}
    both = stack([wholes["up_proj"], wholes["gate_proj"]], axis=1)
    if shared is not None:
        _split_off(shared, layer, wholes, both)
    # In functions: a module in it would be one of the model's.
    down = wholes["down_proj"]
    layer._both = lambda x, chosen, **options: both(x, chosen, **options)
    layer._down = lambda x, chosen, **options: down(x, chosen, **options)
    split = without_bias(both), both.get("bias"), without_bias(down)
    layer._without_biases = lambda: split
    layer.has_shared = shared is not None
    layer.__class__ = StackedGLU


def _split_off(shared: Any, layer: Any, wholes: dict[str, Any], both: Any) -> None:
    """The last expert of each product is `shared`, which has two products of one input, too."""
    own = copy(shared.up_proj)
    for name, whole in wholes.items():
        for entry in STACKED:
            if whole.get(entry) is not None:
                # No number as an index: that would be a copy.
                layer[name][entry] = whole[entry][:-1]
                shared[name][entry] = whole[entry][-1:].squeeze(0)
                own[entry] = both[entry][-1:].squeeze(0)
        mx.eval(layer[name].parameters(), shared[name].parameters())
    mx.eval(own.parameters())
    share_product([shared.up_proj, shared.gate_proj], own)
