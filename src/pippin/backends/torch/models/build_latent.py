"""Weights of a checkpoint to a layer of latent attention: what it makes of its input is one
product, channels that turn with their neighbours turn with those half a head away."""

from __future__ import annotations

import torch

from pippin.backends.torch.models.build_recurrent import WeightSource
from pippin.backends.torch.models.mixers import LatentLayer
from pippin.backends.torch.models.packed import Stacked, cat
from pippin.backends.torch.models.parts import Linear, Norm
from pippin.backends.torch.models.rope import Rope
from pippin.backends.torch.shapes import LatentShape

NORM_EPS = 1e-6  # whatever the config says of other norms


def build_latent(source: WeightSource, name: str, shape: LatentShape, rope: Rope) -> LatentLayer:
    """`name`: the layer's weights' names begin so."""
    latent_order = _pairs_apart(shape, 1, shape.rank)
    query_order = _pairs_apart(shape, shape.num_heads, shape.plain_dim)
    latents = source.linear(f"{name}kv_a_proj_with_mqa", biased=shape.bias, orders=latent_order)
    query_norm: Norm | None = None
    query_up: Linear | None = None
    if shape.query_rank:
        first = source.linear(f"{name}q_a_proj", biased=shape.bias)
        query_norm = Norm(source.take(f"{name}q_a_layernorm.weight", exact=True), NORM_EPS)
        query_up = source.linear(f"{name}q_b_proj", orders=query_order)
    else:
        first = source.linear(f"{name}q_proj", orders=query_order)
    up = source.dense(f"{name}kv_b_proj").unflatten(0, (shape.num_heads, -1))
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
    parts = [linear.weight for linear in (first, second) if not isinstance(linear.weight, Stacked)]
    assert len(parts) == 2, "each is one weight of the checkpoint"
    if second.bias is None:
        return Linear(cat(parts))
    bias = second.bias.new_zeros(parts[0].shape[0]) if first.bias is None else first.bias
    return Linear(cat(parts), torch.cat([bias, second.bias]))


def _pairs_apart(shape: LatentShape, num_heads: int, num_still: int) -> tuple[torch.Tensor, ...]:
    """The order of rows: of each head the last ones are those that turn, behind `num_still`."""
    if not shape.rope_pairs:
        return ()
    rows = torch.arange(num_heads * (num_still + shape.rope.dim))
    still, turned = rows.unflatten(0, (num_heads, -1)).split([num_still, shape.rope.dim], dim=1)
    return (torch.cat([still, turned[:, 0::2], turned[:, 1::2]], dim=1).flatten(),)
