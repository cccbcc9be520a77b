"""A feed-forward layer of many rows: dense through cuBLAS, experts through products of our own."""

from __future__ import annotations

import torch

from pippin.backends.torch.kernels.experts.products import (
    ExpertTile,
    expert_product,
    expert_tile_for,
    weighted_sum,
)
from pippin.backends.torch.kernels.experts.routing import Routes, blocks_of, route
from pippin.backends.torch.kernels.rows import swiglu
from pippin.backends.torch.models.parts import DenseMlp, ExpertMlp, Mlp


def feed_forward(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
    """x [tokens, hidden], normed."""
    if isinstance(mlp, DenseMlp):
        return mlp.down(swiglu(mlp.gate_up(x)))
    return run_experts(mlp, x, route(mlp.router(x), mlp.shape))


def run_experts(
    mlp: ExpertMlp, x: torch.Tensor, routes: Routes, tile: ExpertTile | None = None
) -> torch.Tensor:
    num_tokens, num_chosen = routes.chosen.shape
    num_pairs, num_experts = routes.chosen.numel(), mlp.shape.num_experts
    tile = tile or expert_tile_for(num_tokens, num_pairs / num_experts, x.element_size())
    blocks = blocks_of(routes.chosen, num_experts, tile.pairs)
    y = expert_product(x, mlp.gate_up, blocks, num_pairs, num_chosen, tile, swiglu=True)
    y = expert_product(y, mlp.down, blocks, num_pairs, num_chosen, tile, swiglu=False)
    if mlp.shared is None or mlp.shared_gate is None:
        return weighted_sum(y, routes)
    return weighted_sum(y, routes, feed_forward(mlp.shared, x), mlp.shared_gate(x))
