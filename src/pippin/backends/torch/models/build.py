"""Weights of a checkpoint to a decoder: products of one input are made one, rows in our order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from pippin.backends.mtp_weights import LAYER, PREFIX
from pippin.backends.torch.checkpoint import Weights
from pippin.backends.torch.formats import find_weight
from pippin.backends.torch.models.build_latent import build_latent
from pippin.backends.torch.models.build_mlp import build_mlp
from pippin.backends.torch.models.build_recurrent import build_recurrent
from pippin.backends.torch.models.decoder import Decoder, DecoderLayer, Mixer
from pippin.backends.torch.models.mixers import AttentionLayer, MtpHead
from pippin.backends.torch.models.packed import Weight, cat, dense
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

PACKED_NAMES = ("qweight", "weight_packed")  # GPTQ's and AWQ's, compressed-tensors'


def build_decoder(
    shape: ModelShape,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    mtp: frozenset[str] = frozenset(),
) -> Decoder:
    """`mtp`: names of the MTP head's weights, if it is wanted (`backends/mtp_weights.py`)."""
    builder = _Builder(shape, weights, dtype, max_len, device)
    embed = builder.weight(f"{shape.prefix}embed_tokens")
    weight = embed if shape.tied else builder.linear("lm_head").weight
    head = Head(weight, scale=shape.logit_scale, softcap=shape.logit_softcap)
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
        self,
        shape: ModelShape,
        weights: Weights,
        dtype: torch.dtype,
        max_len: int,
        device: torch.device,
    ) -> None:
        self._shape = shape
        self._weights = weights
        self._dtype = dtype
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
        """A product's weight also where it is packed under another name."""
        stored = self._shape.stored_name(name)
        names = [stored]
        if self._shape.quantization is not None and stored.endswith(".weight"):
            names += [stored.removesuffix("weight") + part for part in PACKED_NAMES]
        return any(map(self._weights.has, names))

    def weight(self, name: str) -> Weight:
        """Of a product: packed where the checkpoint has it packed."""
        stored = self._shape.stored_name(f"{name}.weight").removesuffix(".weight")
        found = find_weight(self._weights, self._shape.quantization, stored, self._dtype)
        self.nbytes += found.nbytes
        return found

    def dense(self, name: str, *, exact: bool = False) -> torch.Tensor:
        """The same, unpacked; `exact`: float32."""
        before, found = self.nbytes, self.weight(name)
        if isinstance(found, torch.Tensor):
            self.nbytes = before
            return self.take(f"{name}.weight", exact=exact)
        made = dense(found).float() if exact else dense(found)
        self.nbytes = before + made.nbytes
        return made

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

    def linear(
        self, *names: str, biased: bool = False, orders: tuple[torch.Tensor, ...] = ()
    ) -> Linear:
        """Products of one input, one below the other. `orders`: of the first ones' rows."""
        parts = [self.weight(name) for name in names]
        biases = [self.take(f"{name}.bias") for name in names] if biased else []
        for place, order in enumerate(orders):
            parts[place] = parts[place][order.to(parts[place].device)]
            if biased:
                biases[place] = biases[place][order.to(biases[place].device)]
        if biased:
            return Linear(cat(parts), torch.cat(biases))
        for name in names:
            if self.has(f"{name}.bias"):
                raise LoadError(
                    f"the checkpoint has a weight {name}.bias, but config.json asks for no such"
                    f" bias of {self._shape.model_type}: correct config.json"
                )
        return Linear(cat(parts))

    def _attention(self, name: str, shape: AttentionShape) -> AttentionLayer:
        kinds = ("qkv",) if self.has(f"{name}qkv_proj.weight") else ("q", "k", "v")
        norms = [self.norm(f"{name}{part}_norm.weight") for part in "qk" if shape.qk_norm]
        if shape.rope_pairs:
            order = _halves_first(shape).to(self._device)
            norms = [replace(norm, weight=norm.weight[..., order]) for norm in norms]
        names = (f"{name}{kind}_proj" for kind in kinds)
        orders = _orders(shape, len(kinds)) if shape.gated or shape.rope_pairs else ()
        return AttentionLayer(
            shape=shape,
            qkv=self.linear(*names, biased=shape.qkv_bias, orders=orders),
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


def _orders(shape: AttentionShape, num_parts: int) -> tuple[torch.Tensor, ...]:
    """Of the rows of queries, keys and values: of all of them as one part, or of three."""
    q_rows, kv_rows = ((1 + shape.gated) * shape.num_heads, shape.num_kv_heads)
    sizes = [rows * shape.head_dim for rows in (q_rows, kv_rows, kv_rows)]
    rows = torch.arange(sum(sizes))
    if shape.gated:
        rows = _gates_apart(rows, shape)
    if shape.rope_pairs:
        rows = _pairs_apart(rows, shape)
    if num_parts == 1:
        return (rows,)
    return tuple(part - part.min() for part in rows.split(sizes))


def _gates_apart(rows: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Rows stored head by head as query and gate; here all queries come first."""
    num_rows = shape.num_heads * shape.head_dim
    by_head = rows[: 2 * num_rows].unflatten(0, (shape.num_heads, 2, shape.head_dim))
    return torch.cat([by_head.transpose(0, 1).flatten(), rows[2 * num_rows :]])


def _pairs_apart(rows: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Of queries and keys whose channels turn with their neighbours; here with those half a head
    away. Scores are the same: queries and keys change places together."""
    num_rows = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    by_head = rows[:num_rows].unflatten(0, (-1, shape.head_dim))
    return torch.cat([by_head[:, _halves_first(shape)].flatten(), rows[num_rows:]])


def _halves_first(shape: AttentionShape) -> torch.Tensor:
    """Of the rotated channels those at even places, then those at odd ones; then the rest."""
    order = torch.arange(shape.head_dim)
    pairs, rest = order[: shape.rope.dim], order[shape.rope.dim :]
    return torch.cat([pairs.view(-1, 2).mT.flatten(), rest])
