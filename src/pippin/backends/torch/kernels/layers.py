"""The decoder's layers. For many rows sums and norms are one kernel, and large products cuBLAS's;
for a few they are products of our own, with norms and sums inside.

Knows no pools: a caller mixes the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from pippin.backends.torch.kernels.epilogues import ConvStep
from pippin.backends.torch.kernels.experts import (
    ExpertTile,
    Routes,
    blocks_of,
    expert_product,
    expert_tile_for,
    route,
    weighted_sum,
)
from pippin.backends.torch.kernels.packed.products import is_packed, is_stacked
from pippin.backends.torch.kernels.products import most_rows, product
from pippin.backends.torch.kernels.rows import add_norm, norm_rows, swiglu
from pippin.backends.torch.models.decoder import Decoder, DecoderLayer, Mix, Mixer
from pippin.backends.torch.models.mixers import AttentionLayer, DeltaLayer
from pippin.backends.torch.models.packed import Packed
from pippin.backends.torch.models.parts import (
    DenseMlp,
    ExpertMlp,
    Linear,
    Mlp,
    Norm,
    SquaredMlp,
    gated,
)


def run_layers(decoder: Decoder, x: torch.Tensor, mix: Mix) -> torch.Tensor:
    """As `Decoder.run` and the last norm, of embeddings: [tokens, hidden], what the head reads."""
    parts = [part for layer in decoder.layers for part in _parts(layer, mix)]
    normed = norm_rows(x, parts[0].norm)
    following = [part.norm for part in parts[1:]] + [decoder.norm]
    for part, norm in zip(parts, following, strict=True):
        y = norm_rows(part.run(normed), part.norm_behind)
        x, normed = add_norm(x, y if part.scale == 1.0 else y * part.scale, norm)
    return normed


MixProjected = Callable[[DecoderLayer, torch.Tensor], torch.Tensor]
ConvOf = Callable[[DecoderLayer], ConvStep | None]


def run_fused(
    decoder: Decoder, x: torch.Tensor, mix: MixProjected, conv_of: ConvOf = lambda layer: None
) -> torch.Tensor:
    """As `run_layers`, of few rows and before the last norm: norms, sums, gated products and, where
    `conv_of` has one, convolutions are parts of the products. `mix` is of what a mixer projects."""
    for layer in decoder.layers:
        mixer = layer.mixer
        assert isinstance(mixer, AttentionLayer | DeltaLayer)
        projected = product(x, first_of(mixer), norm=layer.input_norm, conv=conv_of(layer))
        x = product(mix(layer, projected), mixer.out, residual=x)
        x = _fused_mlp(layer, x)
    return x


def first_of(mixer: Mixer) -> Linear:
    """The product before it mixes."""
    return mixer.qkv if isinstance(mixer, AttentionLayer) else mixer.project


def _fused_mlp(layer: DecoderLayer, x: torch.Tensor) -> torch.Tensor:
    mlp, norm = layer.mlp, layer.mlp_norm
    assert mlp is not None
    if isinstance(mlp, ExpertMlp):
        return _feed_experts(mlp, norm_rows(x, norm), residual=x)
    if not isinstance(mlp, DenseMlp) or mlp.activation.kind != "silu":
        return x + feed_forward(mlp, norm_rows(x, norm))
    return product(product(x, mlp.gate_up, norm=norm, swiglu=True), mlp.down, residual=x)


def most_fused(decoder: Decoder) -> int:
    """Rows that `run_fused` takes at most."""
    if not all(map(_is_plain, decoder.layers)) or not decoder.head.is_plain or is_stacked(decoder):
        return 0
    if decoder.dtype == torch.float32 or is_packed(decoder):
        return 1
    return most_rows(decoder.shape.hidden)


def _is_plain(layer: DecoderLayer) -> bool:
    """Whether products of few rows have its norms and sums inside."""
    norms = (layer.input_norm, layer.mlp_norm)
    return (
        all(norm is not None and not norm.centred for norm in norms)
        and isinstance(layer.mixer, AttentionLayer | DeltaLayer)
        and isinstance(layer.mlp, DenseMlp | ExpertMlp)
        and (layer.mixed_norm, layer.fed_norm) == (None, None)
        and layer.scale == 1.0
        and not layer.parallel
    )


class _Part(NamedTuple):
    """Of a layer: what is added to what came before it."""

    norm: Norm | None
    run: Callable[[torch.Tensor], torch.Tensor]
    norm_behind: Norm | None
    scale: float


def _parts(layer: DecoderLayer, mix: Mix) -> Iterator[_Part]:
    if layer.parallel and layer.mlp is not None:
        mlp = layer.mlp
        yield _Part(
            layer.input_norm, lambda x: mix(layer, x) + feed_forward(mlp, x), None, layer.scale
        )
        return
    if layer.mixer is not None:
        yield _Part(layer.input_norm, partial(mix, layer), layer.mixed_norm, layer.scale)
    if layer.mlp is not None:
        run = partial(feed_forward, layer.mlp)
        yield _Part(layer.mlp_norm, run, layer.fed_norm, layer.scale)


def feed_forward(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
    """x [tokens, hidden], normed."""
    if isinstance(mlp, DenseMlp):
        up = mlp.gate_up(x)
        is_silu = mlp.activation.kind == "silu"
        return mlp.down(swiglu(up) if is_silu else gated(up, mlp.activation))
    if isinstance(mlp, SquaredMlp):
        return mlp(x)
    return _feed_experts(mlp, x)


def _feed_experts(
    mlp: ExpertMlp, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    if mlp.shape.scoring == "softmax" and mlp.shape.scale == 1.0 and mlp.shape.num_groups == 1:
        weight = mlp.router.weight
        one_row = len(x) == 1 and isinstance(weight, torch.Tensor) and weight.dtype == x.dtype
        logits = product(x, mlp.router) if one_row else mlp.router(x)
        return run_experts(mlp, x, route(logits, mlp.shape), residual=residual)
    weights, chosen = mlp.route(x)  # plain operations, which wait for nothing
    return run_experts(mlp, x, Routes(weights, chosen.int()), residual=residual)


def run_experts(
    mlp: ExpertMlp,
    x: torch.Tensor,
    routes: Routes,
    tile: ExpertTile | None = None,
    residual: torch.Tensor | None = None,  # [tokens, hidden]: what the result is added to
) -> torch.Tensor:
    num_tokens, num_chosen = routes.chosen.shape
    num_pairs, num_experts = routes.chosen.numel(), mlp.shape.num_experts
    packed = isinstance(mlp.gate_up, Packed) or isinstance(mlp.down, Packed)
    each = num_pairs / num_experts
    tile = tile or expert_tile_for(num_tokens, each, x.element_size(), packed=packed)
    blocks = blocks_of(routes.chosen, num_experts, tile.pairs)
    if not mlp.shape.gated:
        pairs = x.repeat_interleave(num_chosen, dim=0)
        y = expert_product(pairs, mlp.gate_up, blocks, num_pairs, num_chosen, tile, swiglu=False)
        y = F.relu(y).square()
    elif mlp.shape.activation.kind == "silu" and mlp.gate_up_bias is None:
        y = expert_product(x, mlp.gate_up, blocks, num_pairs, num_chosen, tile, swiglu=True)
    else:
        pairs = x.repeat_interleave(num_chosen, dim=0)
        y = expert_product(pairs, mlp.gate_up, blocks, num_pairs, num_chosen, tile, swiglu=False)
        y = gated(_biased(y, mlp.gate_up_bias, routes), mlp.shape.activation)
    y = expert_product(y, mlp.down, blocks, num_pairs, num_chosen, tile, swiglu=False)
    y = _biased(y, mlp.down_bias, routes)
    if mlp.shared is None:
        return weighted_sum(y, routes, residual)
    shared = feed_forward(mlp.shared, x)
    if mlp.shared_gate is None:
        return weighted_sum(y, routes, residual) + shared
    return weighted_sum(y, routes, residual, shared, mlp.shared_gate(x))


def _biased(y: torch.Tensor, bias: torch.Tensor | None, routes: Routes) -> torch.Tensor:
    """y [pairs, n], bias [experts, n]"""
    return y if bias is None else y + bias[routes.chosen.flatten()]
