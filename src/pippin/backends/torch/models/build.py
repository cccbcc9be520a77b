"""Weights of a checkpoint to a decoder: products of one input are made one, rows in our order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from pippin.backends.mtp_weights import LAYER, PREFIX
from pippin.backends.torch.checkpoint import Weights
from pippin.backends.torch.models.attention_layer import AttentionLayer
from pippin.backends.torch.models.build_latent import build_latent
from pippin.backends.torch.models.build_mlp import build_mlp
from pippin.backends.torch.models.build_recurrent import build_recurrent
from pippin.backends.torch.models.decoder import Decoder, DecoderLayer, Mixer
from pippin.backends.torch.models.mtp_head import MtpHead
from pippin.backends.torch.models.parts import Head, Linear, Norm
from pippin.backends.torch.models.rope import Rope
from pippin.backends.torch.shapes import (
    AttentionShape,
    DeltaShape,
    DenseShape,
    ExpertShape,
    LatentShape,
    LayerShape,
    MixerShape,
    ModelShape,
    RopeShape,
)
from pippin.errors import LoadError
from pippin.types import Component


def build_decoder(
    shape: ModelShape,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    mtp: frozenset[str] = frozenset(),
) -> Decoder:
    """`mtp`: names of the MTP head's weights, if it is wanted (`backends/mtp_weights.py`)."""
    builder = _Builder(shape, weights, max_len, device)
    embed = builder.take(f"{shape.prefix}embed_tokens.weight")
    weight = embed if shape.tied else builder.linear("lm_head").weight
    head = Head(weight, None, shape.logit_scale, shape.logit_softcap)
    embed_scale = float(torch.tensor(shape.embed_scale, dtype=dtype))  # as embeddings are
    layers = []
    numbers: Counter[Component | None] = Counter()
    for index, layer in enumerate(shape.layers):
        layers.append(builder.layer(index, layer, numbers[layer.kind]))
        numbers[layer.kind] += 1
    norm = builder.norm(f"{shape.prefix}norm.weight")
    drafter = builder.mtp_head(mtp) if mtp else None
    return Decoder(
        shape,
        dtype,
        embed,
        tuple(layers),
        norm,
        head,
        nbytes=builder.nbytes,
        embed_scale=embed_scale,
        mtp=drafter,
    )


class _Builder:
    def __init__(
        self, shape: ModelShape, weights: Weights, max_len: int, device: torch.device
    ) -> None:
        self._shape = shape
        self._weights = weights
        self._norm_offset = _norm_offset(shape, weights)
        self._max_len = max_len
        self._device = device
        self._ropes: list[tuple[RopeShape, Rope]] = []
        self.nbytes = 0

    def take(self, name: str, *, exact: bool = False) -> torch.Tensor:
        tensor = self._weights.take(self._shape.stored_name(name), exact=exact)
        self.nbytes += tensor.nbytes
        return tensor

    def has(self, name: str) -> bool:
        return self._weights.has(self._shape.stored_name(name))

    def layer(self, index: int, shape: LayerShape, number: int) -> DecoderLayer:
        name, names = f"{self._shape.prefix}layers.{index}.", self._shape.norms

        def norm(own: str) -> Norm | None:
            return self.norm(f"{name}{own}.weight") if own else None

        return DecoderLayer(
            number=number,
            input_norm=norm(names.input),
            mixer=None if shape.mixer is None else self._mixer(name, shape.mixer),
            mlp_norm=norm(names.mlp),
            mlp=None if shape.mlp is None else build_mlp(self, name, shape.mlp),
            mixed_norm=norm(names.mixed),
            fed_norm=norm(names.fed),
            scale=self._shape.residual_scale,
            parallel=self._shape.parallel,
        )

    def _mixer(self, name: str, shape: MixerShape) -> Mixer:
        if isinstance(shape, AttentionShape):
            return self._attention(f"{name}self_attn.", shape)
        if isinstance(shape, LatentShape):
            return build_latent(self, f"{name}self_attn.", shape, self._rope(shape.rope))
        return build_recurrent(self, name, shape, self._shape.eps)

    def mtp_head(self, names: frozenset[str]) -> MtpHead:
        """Its layer is as the model's last one that attends."""
        layer = f"{PREFIX}{LAYER}"
        (*_, mixer) = self._shape.mixers(AttentionShape)
        kind = ExpertShape if f"{LAYER}mlp.gate.weight" in names else DenseShape
        mlps = (layer.mlp for layer in self._shape.layers if isinstance(layer.mlp, kind))

        def norm(name: str) -> Norm:
            return self.norm(f"{PREFIX}{name}.weight")

        return MtpHead(
            fc=self.linear(f"{PREFIX}fc"),
            embed_norm=norm("pre_fc_norm_embedding"),
            hidden_norm=norm("pre_fc_norm_hidden"),
            input_norm=self.norm(f"{layer}input_layernorm.weight"),
            mixer=self._attention(f"{layer}self_attn.", mixer),
            mlp_norm=self.norm(f"{layer}post_attention_layernorm.weight"),
            mlp=build_mlp(self, layer, next(mlps, DenseShape(0))),
            norm=norm("norm"),
        )

    def norm(self, name: str) -> Norm:
        weight = self.take(name, exact=True)
        return Norm(weight + self._norm_offset, self._shape.eps, self._shape.centred_norms)

    def linear(self, *names: str, biased: bool = False) -> Linear:
        """Products of one input, one below the other."""
        weight = torch.cat([self.take(f"{name}.weight") for name in names])
        if biased:
            return Linear(weight, torch.cat([self.take(f"{name}.bias") for name in names]))
        for name in names:
            if self.has(f"{name}.bias"):
                raise LoadError(
                    f"the checkpoint has a weight {name}.bias, but config.json asks for no such"
                    f" bias of {self._shape.model_type}: correct config.json"
                )
        return Linear(weight)

    def _attention(self, name: str, shape: AttentionShape) -> AttentionLayer:
        parts = ("qkv",) if self.has(f"{name}qkv_proj.weight") else ("q", "k", "v")
        qkv = self.linear(*(f"{name}{part}_proj" for part in parts), biased=shape.qkv_bias)
        if shape.gated:
            bias = None if qkv.bias is None else _gates_apart(qkv.bias, shape)
            qkv = Linear(_gates_apart(qkv.weight, shape), bias)
        norms = [self.norm(f"{name}{part}_norm.weight") for part in "qk" if shape.qk_norm]
        if shape.rope_pairs:
            bias = None if qkv.bias is None else _pairs_apart(qkv.bias, shape)
            qkv = Linear(_pairs_apart(qkv.weight, shape), bias)
            order = _halves_first(shape, qkv.weight.device)
            norms = [replace(norm, weight=norm.weight[..., order]) for norm in norms]
        return AttentionLayer(
            shape=shape,
            qkv=qkv,
            out=self.linear(f"{name}o_proj", biased=shape.out_bias),
            rope=self._rope(shape.rope),
            q_norm=norms[0] if norms else None,
            k_norm=norms[1] if norms else None,
            sinks=self.take(f"{name}sinks", exact=True) if shape.sinks else None,
        )

    def _rope(self, shape: RopeShape) -> Rope:
        """One table for all layers of a shape."""
        for known, rope in self._ropes:
            if known == shape:
                return rope
        rope = Rope.of(shape, self._max_len, self._device)
        self._ropes.append((shape, rope))
        return rope


def _norm_offset(shape: ModelShape, weights: Weights) -> float:
    """mlx-lm's checkpoints have it added, and store convolutions the other way round."""
    mixers = enumerate(layer.mixer for layer in shape.layers)
    first = next((index for index, mixer in mixers if isinstance(mixer, DeltaShape)), None)
    if first is None:
        return shape.norm_offset
    conv = f"{shape.prefix}layers.{first}.linear_attn.conv1d.weight"
    return 0.0 if weights.take(conv).shape[-1] == 1 else shape.norm_offset


def _gates_apart(weight: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Rows stored head by head as query and gate; here all queries come first."""
    num_rows = shape.num_heads * shape.head_dim
    queries, rest = weight[: 2 * num_rows], weight[2 * num_rows :]
    by_head = queries.unflatten(0, (shape.num_heads, 2, shape.head_dim))
    q, gate = (by_head[:, part].flatten(0, 1) for part in (0, 1))
    return torch.cat([q, gate, rest])


def _pairs_apart(weight: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Rows of queries and keys whose channels turn with their neighbours; here with those half a
    head away. Scores are the same: queries and keys change places together."""
    num_rows = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    by_head = weight[:num_rows].unflatten(0, (-1, shape.head_dim))
    turned = by_head[:, _halves_first(shape, weight.device)].flatten(0, 1)
    return torch.cat([turned, weight[num_rows:]])


def _halves_first(shape: AttentionShape, device: torch.device) -> torch.Tensor:
    """Of the rotated channels those at even places, then those at odd ones; then the rest."""
    order = torch.arange(shape.head_dim, device=device)
    pairs, rest = order[: shape.rope.dim], order[shape.rope.dim :]
    return torch.cat([pairs.view(-1, 2).mT.flatten(), rest])
