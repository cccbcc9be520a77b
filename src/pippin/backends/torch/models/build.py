"""Weights of a checkpoint to a decoder: products of one input are made one, rows in our order."""

from __future__ import annotations

from collections import Counter

import torch

from pippin.backends.mtp_weights import LAYER, PREFIX
from pippin.backends.torch.checkpoint import Weights
from pippin.backends.torch.models.attention_layer import AttentionLayer
from pippin.backends.torch.models.build_recurrent import build_recurrent
from pippin.backends.torch.models.decoder import Decoder, DecoderLayer, Mixer
from pippin.backends.torch.models.mtp_head import MtpHead
from pippin.backends.torch.models.parts import DenseMlp, ExpertMlp, Linear, Mlp, Norm, SquaredMlp
from pippin.backends.torch.models.rope import Rope
from pippin.backends.torch.shapes import (
    AttentionShape,
    DeltaShape,
    DenseShape,
    ExpertShape,
    LayerShape,
    MixerShape,
    MlpShape,
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
    head = Linear(embed) if shape.tied else builder.linear("lm_head")
    layers = []
    numbers: Counter[Component | None] = Counter()
    for index, layer in enumerate(shape.layers):
        layers.append(builder.layer(index, layer, numbers[layer.kind]))
        numbers[layer.kind] += 1
    norm = builder.norm(f"{shape.prefix}norm.weight")
    drafter = builder.mtp_head(mtp) if mtp else None
    return Decoder(
        shape, dtype, embed, tuple(layers), norm, head, nbytes=builder.nbytes, mtp=drafter
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
        name = f"{self._shape.prefix}layers.{index}."
        return DecoderLayer(
            number=number,
            input_norm=self.norm(f"{name}input_layernorm.weight"),
            mixer=None if shape.mixer is None else self._mixer(name, shape.mixer),
            mlp_norm=self.norm(f"{name}post_attention_layernorm.weight"),
            mlp=None if shape.mlp is None else self._mlp(f"{name}mlp.", shape.mlp),
        )

    def _mixer(self, name: str, shape: MixerShape) -> Mixer:
        if isinstance(shape, AttentionShape):
            return self._attention(f"{name}self_attn.", shape)
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
            mlp=self._mlp(f"{layer}mlp.", next(mlps, DenseShape(0))),
            norm=norm("norm"),
        )

    def norm(self, name: str) -> Norm:
        weight = self.take(name, exact=True)
        return Norm(weight + self._norm_offset, self._shape.eps)

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
        names = (f"{name}{part}_proj" for part in ("q", "k", "v"))
        qkv = self.linear(*names, biased=shape.qkv_bias)
        if shape.gated:
            bias = None if qkv.bias is None else _gates_apart(qkv.bias, shape)
            qkv = Linear(_gates_apart(qkv.weight, shape), bias)
        return AttentionLayer(
            shape=shape,
            qkv=qkv,
            out=self.linear(f"{name}o_proj", biased=shape.out_bias),
            rope=self._rope(shape.rope),
            q_norm=self.norm(f"{name}q_norm.weight") if shape.qk_norm else None,
            k_norm=self.norm(f"{name}k_norm.weight") if shape.qk_norm else None,
        )

    def _rope(self, shape: RopeShape) -> Rope:
        """One table for all layers of a shape."""
        for known, rope in self._ropes:
            if known == shape:
                return rope
        rope = Rope.of(shape, self._max_len, self._device)
        self._ropes.append((shape, rope))
        return rope

    def _mlp(self, name: str, shape: MlpShape) -> Mlp:
        if isinstance(shape, DenseShape) and not shape.gated:
            up, down = (self.linear(f"{name}{p}_proj", biased=shape.bias) for p in ("up", "down"))
            return SquaredMlp(up, down)
        if isinstance(shape, DenseShape):
            return self._dense(name, biased=shape.bias)
        has_shared = shape.shared_intermediate > 0
        gate_up, down = self._expert_weights(name, shape.num_experts)
        return ExpertMlp(
            shape=shape,
            router=self.linear(f"{name}gate"),
            gate_up=gate_up,
            down=down,
            shared=self._dense(f"{name}shared_expert.") if has_shared else None,
            shared_gate=self.linear(f"{name}shared_expert_gate") if has_shared else None,
        )

    def _dense(self, name: str, *, biased: bool = False) -> DenseMlp:
        return DenseMlp(
            self.linear(f"{name}gate_proj", f"{name}up_proj", biased=biased),
            self.linear(f"{name}down_proj", biased=biased),
        )

    def _expert_weights(self, name: str, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored as one tensor for all experts, as mlx-lm's three, or expert by expert."""
        if self.has(f"{name}experts.gate_up_proj"):
            return self.take(f"{name}experts.gate_up_proj"), self.take(f"{name}experts.down_proj")
        if self.has(f"{name}switch_mlp.gate_proj.weight"):
            parts = (f"{name}switch_mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
            gate, up, down = map(self.take, parts)
            return torch.cat([gate, up], dim=1), down
        mlps = [self._dense(f"{name}experts.{expert}.") for expert in range(num_experts)]
        gate_up = torch.stack([mlp.gate_up.weight for mlp in mlps])
        return gate_up, torch.stack([mlp.down.weight for mlp in mlps])


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
