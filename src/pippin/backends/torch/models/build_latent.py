"""Weights of a checkpoint to a layer of latent attention: what it makes of its input is one
product, channels that turn with their neighbours turn with those half a head away."""

from __future__ import annotations

import torch

from pippin.backends.torch.models.build_recurrent import WeightSource
from pippin.backends.torch.models.latent_layer import LatentLayer
from pippin.backends.torch.models.parts import Linear, Norm
from pippin.backends.torch.models.rope import Rope
from pippin.backends.torch.shapes import LatentShape

NORM_EPS = 1e-6  # whatever the config says of other norms


def build_latent(source: WeightSource, name: str, shape: LatentShape, rope: Rope) -> LatentLayer:
    """`name`: the layer's weights' names begin so."""
    latents = source.linear(f"{name}kv_a_proj_with_mqa", biased=shape.bias)
    latents = _each(latents, shape, num_heads=1)
    query_norm: Norm | None = None
    query_up: Linear | None = None
    if shape.query_rank:
        first = source.linear(f"{name}q_a_proj", biased=shape.bias)
        query_norm = Norm(source.take(f"{name}q_a_layernorm.weight", exact=True), NORM_EPS)
        query_up = _each(source.linear(f"{name}q_b_proj"), shape, shape.num_heads)
    else:
        first = _each(source.linear(f"{name}q_proj"), shape, shape.num_heads)
    up = source.take(f"{name}kv_b_proj.weight").unflatten(0, (shape.num_heads, -1))
    up_k, up_v = up.split([shape.plain_dim, shape.value_dim], dim=1)
    return LatentLayer(
        shape=shape,
        project=_one_below_the_other(first, latents),
        query_norm=query_norm,
        query_up=query_up,
        latent_norm=Norm(source.take(f"{name}kv_a_layernorm.weight", exact=True), NORM_EPS),
        up_k=up_k.contiguous(),
        up_v=up_v.contiguous(),
        rope=rope,
        out=source.linear(f"{name}o_proj", biased=shape.bias),
    )


def _one_below_the_other(first: Linear, second: Linear) -> Linear:
    weight = torch.cat([first.weight, second.weight])
    if second.bias is None:
        return Linear(weight)
    bias = second.bias.new_zeros(len(first.weight)) if first.bias is None else first.bias
    return Linear(weight, torch.cat([bias, second.bias]))


def _each(product: Linear, shape: LatentShape, num_heads: int) -> Linear:
    """The last rows of each head are those that turn."""
    if not shape.rope_pairs:
        return product
    return Linear(
        _pairs_apart(product.weight, shape, num_heads),
        None if product.bias is None else _pairs_apart(product.bias, shape, num_heads),
    )


def _pairs_apart(rows: torch.Tensor, shape: LatentShape, num_heads: int) -> torch.Tensor:
    by_head = rows.unflatten(0, (num_heads, -1))
    rest, turned = by_head.split([by_head.shape[1] - shape.rope.dim, shape.rope.dim], dim=1)
    return torch.cat([rest, turned[:, 0::2], turned[:, 1::2]], dim=1).flatten(0, 1)
