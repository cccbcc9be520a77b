"""Weights of a checkpoint to a decoder: products of one input are made one, rows in our order."""

from __future__ import annotations

import torch

from pippin.backends.mtp_weights import LAYER, PREFIX
from pippin.backends.torch.checkpoint import Weights
from pippin.backends.torch.config import DeltaShape, ExpertShape, ModelShape
from pippin.backends.torch.models.attention_layer import AttentionLayer
from pippin.backends.torch.models.decoder import Decoder, DecoderLayer
from pippin.backends.torch.models.delta_layer import DeltaLayer
from pippin.backends.torch.models.mtp_head import MtpHead
from pippin.backends.torch.models.parts import DenseMlp, ExpertMlp, Linear, Mlp, Norm
from pippin.backends.torch.models.rope import Rope
from pippin.errors import LoadError


def build_decoder(
    shape: ModelShape,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    max_len: int,
    mtp: frozenset[str] = frozenset(),
) -> Decoder:
    """`mtp`: names of the MTP head's weights, if it is wanted (`backends/mtp_weights.py`)."""
    builder = _Builder(shape, weights, Rope.of(shape.rope, max_len, device))
    embed = builder.take(f"{shape.prefix}embed_tokens.weight")
    head = Linear(embed) if shape.tied else builder.linear("lm_head")
    counts = {"attention": 0, "window": 0, "delta": 0}
    layers = []
    for index, kind in enumerate(shape.layers):
        layers.append(builder.layer(index, counts[kind]))
        counts[kind] += 1
    norm = builder.norm(f"{shape.prefix}norm.weight")
    drafter = builder.mtp_head(mtp) if mtp else None
    return Decoder(
        shape, dtype, embed, tuple(layers), norm, head, nbytes=builder.nbytes, mtp=drafter
    )


class _Builder:
    def __init__(self, shape: ModelShape, weights: Weights, rope: Rope) -> None:
        self._shape = shape
        self._weights = weights
        self._rope = rope
        self.nbytes = 0

    def take(self, name: str, *, exact: bool = False) -> torch.Tensor:
        tensor = self._weights.take(name, exact=exact)
        self.nbytes += tensor.nbytes
        return tensor

    def layer(self, index: int, number: int) -> DecoderLayer:
        name = f"{self._shape.prefix}layers.{index}."
        kind = self._shape.layers[index]
        window = self._shape.window if kind == "window" else 0
        return DecoderLayer(
            number=number,
            input_norm=self.norm(f"{name}input_layernorm.weight"),
            mixer=self._delta(f"{name}linear_attn.")
            if kind == "delta"
            else self._attention(f"{name}self_attn.", window),
            mlp_norm=self.norm(f"{name}post_attention_layernorm.weight"),
            mlp=self._mlp(f"{name}mlp.", self._experts_of(index)),
        )

    def mtp_head(self, names: frozenset[str]) -> MtpHead:
        layer = f"{PREFIX}{LAYER}"
        experts = self._shape.experts if f"{LAYER}mlp.gate.weight" in names else None

        def norm(name: str) -> Norm:
            return self.norm(f"{PREFIX}{name}.weight")

        return MtpHead(
            fc=self.linear(f"{PREFIX}fc"),
            embed_norm=norm("pre_fc_norm_embedding"),
            hidden_norm=norm("pre_fc_norm_hidden"),
            input_norm=self.norm(f"{layer}input_layernorm.weight"),
            mixer=self._attention(f"{layer}self_attn.", window=0),
            mlp_norm=self.norm(f"{layer}post_attention_layernorm.weight"),
            mlp=self._mlp(f"{layer}mlp.", experts),
            norm=norm("norm"),
        )

    def _experts_of(self, index: int) -> ExpertShape | None:
        experts = self._shape.experts
        return experts if experts is not None and index in experts.layers else None

    def norm(self, name: str) -> Norm:
        weight = self.take(name, exact=True)
        return Norm(weight + self._shape.norm_offset, self._shape.eps)

    def linear(self, *names: str, biased: bool = False) -> Linear:
        """Products of one input, one below the other."""
        weight = torch.cat([self.take(f"{name}.weight") for name in names])
        if biased:
            return Linear(weight, torch.cat([self.take(f"{name}.bias") for name in names]))
        for name in names:
            if self._weights.has(f"{name}.bias"):
                raise LoadError(
                    f"the checkpoint has a weight {name}.bias, but config.json asks for no such"
                    f" bias of {self._shape.model_type}: correct config.json"
                )
        return Linear(weight)

    def _attention(self, name: str, window: int) -> AttentionLayer:
        shape = self._shape
        names = (f"{name}{part}_proj" for part in ("q", "k", "v"))
        qkv = self.linear(*names, biased=shape.qkv_bias)
        if shape.gated_attention:
            bias = None if qkv.bias is None else _gates_apart(qkv.bias, shape)
            qkv = Linear(_gates_apart(qkv.weight, shape), bias)
        return AttentionLayer(
            qkv=qkv,
            out=self.linear(f"{name}o_proj", biased=shape.out_bias),
            rope=self._rope,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            gated=shape.gated_attention,
            window=window,
            q_norm=self.norm(f"{name}q_norm.weight") if shape.qk_norm else None,
            k_norm=self.norm(f"{name}k_norm.weight") if shape.qk_norm else None,
        )

    def _delta(self, name: str) -> DeltaLayer:
        shape = self._shape.delta
        assert shape is not None
        if shape.interleaved:
            qkvz, ba = self.linear(f"{name}in_proj_qkvz"), self.linear(f"{name}in_proj_ba")
            project = Linear(_heads_apart(qkvz.weight, ba.weight, shape))
        else:
            project = self.linear(*(f"{name}in_proj_{part}" for part in ("qkv", "z", "b", "a")))
        return DeltaLayer(
            shape=shape,
            project=project,
            taps=self.take(f"{name}conv1d.weight").squeeze(1).T.contiguous(),
            decay=-self.take(f"{name}A_log", exact=True).exp(),
            dt_bias=self.take(f"{name}dt_bias", exact=True),
            norm=Norm(self.take(f"{name}norm.weight", exact=True), self._shape.eps),
            out=self.linear(f"{name}out_proj"),
        )

    def _mlp(self, name: str, experts: ExpertShape | None) -> Mlp:
        if experts is None:
            return self._dense(name)
        has_shared = experts.shared_intermediate > 0
        gate_up, down = self._expert_weights(f"{name}experts.", experts.num_experts)
        return ExpertMlp(
            shape=experts,
            router=self.linear(f"{name}gate"),
            gate_up=gate_up,
            down=down,
            shared=self._dense(f"{name}shared_expert.") if has_shared else None,
            shared_gate=self.linear(f"{name}shared_expert_gate") if has_shared else None,
        )

    def _dense(self, name: str) -> DenseMlp:
        biased = self._shape.mlp_bias
        return DenseMlp(
            self.linear(f"{name}gate_proj", f"{name}up_proj", biased=biased),
            self.linear(f"{name}down_proj", biased=biased),
        )

    def _expert_weights(self, name: str, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored as one tensor for all experts, or expert by expert."""
        if self._weights.has(f"{name}gate_up_proj"):
            return self.take(f"{name}gate_up_proj"), self.take(f"{name}down_proj")
        mlps = [self._dense(f"{name}{expert}.") for expert in range(num_experts)]
        gate_up = torch.stack([mlp.gate_up.weight for mlp in mlps])
        return gate_up, torch.stack([mlp.down.weight for mlp in mlps])


def _gates_apart(weight: torch.Tensor, shape: ModelShape) -> torch.Tensor:
    """Rows stored head by head as query and gate; here all queries come first."""
    num_rows = shape.num_heads * shape.head_dim
    queries, rest = weight[: 2 * num_rows], weight[2 * num_rows :]
    by_head = queries.unflatten(0, (shape.num_heads, 2, shape.head_dim))
    q, gate = (by_head[:, part].flatten(0, 1) for part in (0, 1))
    return torch.cat([q, gate, rest])


def _heads_apart(qkvz: torch.Tensor, ba: torch.Tensor, shape: DeltaShape) -> torch.Tensor:
    """Stored key head by key head as q, k, values, z and as b, a; here part by part."""
    per_key = shape.num_v_heads // shape.num_k_heads
    v_rows = per_key * shape.v_dim
    by_head = qkvz.unflatten(0, (shape.num_k_heads, -1))
    q, k, v, z = by_head.split([shape.k_dim, shape.k_dim, v_rows, v_rows], dim=1)
    b, a = ba.unflatten(0, (shape.num_k_heads, -1)).split([per_key, per_key], dim=1)
    return torch.cat([part.flatten(0, 1) for part in (q, k, v, z, b, a)])
