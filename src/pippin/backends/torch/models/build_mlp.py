"""Weights of a checkpoint to feed-forward layers, whatever a family calls them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from pippin.backends.torch.models.packed import Weight, are_alike, combine
from pippin.backends.torch.models.parts import DenseMlp, ExpertMlp, Linear, Mlp, SquaredMlp
from pippin.backends.torch.shapes import Activation, DenseShape, ExpertShape, MlpShape
from pippin.errors import LoadError

PARTS = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_PARTS = ("w1", "w3", "w2")


class Builder(Protocol):
    def has(self, name: str) -> bool: ...

    def take(self, name: str, *, exact: bool = False) -> torch.Tensor: ...

    def weight(self, name: str) -> Weight:
        """Of a product, packed or dense; `name` without `.weight`."""
        ...

    def dense(self, name: str, *, exact: bool = False) -> torch.Tensor:
        """The same, unpacked; `exact`: float32."""
        ...

    def linear(self, *names: str, biased: bool = False) -> Linear:
        """Products of one input, one below the other."""
        ...


def build_mlp(weights: Builder, layer: str, shape: MlpShape) -> Mlp:
    """`layer`: how the names of a layer's weights start."""
    if isinstance(shape, DenseShape) and not shape.gated:
        return _squared(weights, f"{layer}mlp.", biased=shape.bias)
    if isinstance(shape, DenseShape):
        return _dense(weights, f"{layer}mlp.", shape.activation, biased=shape.bias)
    own = "block_sparse_moe." if weights.has(f"{layer}block_sparse_moe.gate.weight") else "mlp."
    return _experts(weights, f"{layer}{own}", shape)


def _experts(weights: Builder, name: str, shape: ExpertShape) -> ExpertMlp:
    router = "router" if shape.bias else "gate"
    is_exact = shape.scoring == "sigmoid"
    choice, experts = f"{name}gate.e_score_correction_bias", f"{name}experts."
    shared = "shared_expert" if shape.shared_gated else "shared_experts"
    gate_up, down = _expert_weights(weights, name, shape)
    biases = [
        weights.take(f"{experts}{part}_proj_bias") for part in ("gate_up", "down") if shape.bias
    ]
    return ExpertMlp(
        shape=shape,
        router=Linear(weights.dense(f"{name}{router}", exact=True))
        if is_exact
        else weights.linear(f"{name}{router}", biased=shape.bias),
        gate_up=gate_up,
        down=down,
        shared=_shared(weights, f"{name}{shared}.", shape) if shape.shared_intermediate else None,
        shared_gate=weights.linear(f"{name}shared_expert_gate")
        if shape.shared_intermediate and shape.shared_gated
        else None,
        choice_bias=weights.take(choice, exact=True) if is_exact else None,
        gate_up_bias=_neighbours_apart(biases[0], 1) if biases else None,
        down_bias=biases[1] if biases else None,
    )


def _shared(weights: Builder, name: str, shape: ExpertShape) -> DenseMlp | SquaredMlp:
    return _dense(weights, name, shape.activation) if shape.gated else _squared(weights, name)


def _squared(weights: Builder, name: str, *, biased: bool = False) -> SquaredMlp:
    up, down = (weights.linear(f"{name}{part}", biased=biased) for part in PARTS[1:])
    return SquaredMlp(up, down)


def _expert_weights(weights: Builder, name: str, shape: ExpertShape) -> tuple[Weight, Weight]:
    """Stored as one tensor for all experts, as mlx-lm's three, or expert by expert."""
    if weights.has(f"{name}experts.gate_up_proj_blocks"):  # gpt-oss, packed: gate and up in turn
        gate_up = weights.weight(f"{name}experts.gate_up_proj")
        apart = combine([gate_up], lambda tensors: _neighbours_apart(tensors[0], 1))
        return apart, weights.weight(f"{name}experts.down_proj")
    if weights.has(f"{name}experts.gate_up_proj"):
        all_up, down = (weights.take(f"{name}experts.{part}_proj") for part in ("gate_up", "down"))
        if shape.bias:  # gpt-oss: of inputs by outputs, gate and up in turn
            return _neighbours_apart(all_up.mT, 1), down.mT.contiguous()
        return all_up, down
    if weights.has(f"{name}switch_mlp.gate_proj.weight"):
        stored = [weights.weight(f"{name}switch_mlp.{part}") for part in PARTS]
    else:
        parts: tuple[str, ...] = PARTS
        if weights.has(f"{name}experts.0.w1.weight"):
            parts = MIXTRAL_PARTS
        if not shape.gated:
            parts = PARTS[1:]
        stored = [
            _alike([weights.weight(f"{name}experts.{i}.{part}") for i in range(shape.num_experts)])
            for part in parts
        ]
    *upward, downward = stored
    if len(upward) == 1:
        return upward[0], downward
    return _alike(upward, partial(torch.cat, dim=1)), downward


def _alike(
    weights: list[Weight], how: Callable[[list[torch.Tensor]], torch.Tensor] = torch.stack
) -> Weight:
    if not are_alike(weights):
        raise LoadError(
            "experts of one layer are quantized in different ways, which the torch backend does"
            " not serve"
        )
    return combine(weights, how)


def _dense(
    weights: Builder,
    name: str,
    activation: Activation,
    parts: tuple[str, str, str] = PARTS,
    *,
    biased: bool = False,
) -> DenseMlp:
    gate, up, down = (f"{name}{part}" for part in parts)
    upward: tuple[str, ...] = (gate, up)
    if weights.has(f"{name}gate_up_proj.weight"):
        upward = (f"{name}gate_up_proj",)
    return DenseMlp(
        weights.linear(*upward, biased=biased), weights.linear(down, biased=biased), activation
    )


def _neighbours_apart(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """Those at even places, then those at odd ones."""
    size = weight.shape[dim]
    order = torch.arange(size, device=weight.device).view(-1, 2).mT.flatten()
    return weight.index_select(dim, order)
