"""The decoder's layers for many rows: sums and norms are one kernel, large products are cuBLAS's.

Knows no pools: a caller mixes the tokens.
"""

from __future__ import annotations

import torch

from pippin.backends.torch.kernels.experts.products import (
    ExpertTile,
    expert_product,
    expert_tile_for,
    weighted_sum,
)
from pippin.backends.torch.kernels.experts.routing import Routes, blocks_of, route
from pippin.backends.torch.kernels.rows import add_norm, norm_rows, swiglu
from pippin.backends.torch.models.decoder import Decoder, Mix
from pippin.backends.torch.models.parts import DenseMlp, ExpertMlp, Mlp


def run_layers(decoder: Decoder, x: torch.Tensor, mix: Mix) -> torch.Tensor:
    """As `Decoder.run` and the last norm, of embeddings: [tokens, hidden], what the head reads."""
    layers = decoder.layers
    normed = norm_rows(x, layers[0].input_norm)
    for index, layer in enumerate(layers):
        x, normed = add_norm(x, mix(layer, normed), layer.mlp_norm)
        last = index + 1 == len(layers)
        following = decoder.norm if last else layers[index + 1].input_norm
        x, normed = add_norm(x, feed_forward(layer.mlp, normed), following)
    return normed


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
