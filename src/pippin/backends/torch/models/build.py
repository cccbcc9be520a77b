"""Weights of a checkpoint to a decoder: products of one input are made one, rows in our order.

Channels that turn with their neighbours turn here with those half a head away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from pippin.backends.mtp_weights import LAYER, PREFIX
from pippin.backends.torch.checkpoint import Weights
from pippin.backends.torch.formats import find_weight
from pippin.backends.torch.models.decoder import Decoder, DecoderLayer, Mixer, RecurrentLayer
from pippin.backends.torch.models.mixers import (
    AttentionLayer,
    ConvLayer,
    DeltaLayer,
    LatentLayer,
    MambaLayer,
    MtpHead,
)
from pippin.backends.torch.models.packed import Stacked, Weight, are_alike, cat, combine, dense
from pippin.backends.torch.models.parts import (
    DenseMlp,
    ExpertMlp,
    Head,
    Linear,
    Mlp,
    Norm,
    Rope,
    SquaredMlp,
)
from pippin.backends.torch.shapes import (
    Activation,
    AttentionShape,
    ConvShape,
    DeltaShape,
    DenseShape,
    ExpertShape,
    LatentShape,
    LayerShape,
    MambaShape,
    MixerShape,
    MlpShape,
    ModelShape,
    RecurrentShape,
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


NORM_EPS = 1e-6  # whatever the config says of other norms


def build_latent(source: _Builder, name: str, shape: LatentShape, rope: Rope) -> LatentLayer:
    """`name`: the layer's weights' names begin so."""
    latent_order = _turned_last(shape, 1, shape.rank)
    query_order = _turned_last(shape, shape.num_heads, shape.plain_dim)
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


def _turned_last(shape: LatentShape, num_heads: int, num_still: int) -> tuple[torch.Tensor, ...]:
    """The order of rows: of each head the last ones are those that turn, behind `num_still`."""
    if not shape.rope_pairs:
        return ()
    rows = torch.arange(num_heads * (num_still + shape.rope.dim))
    still, turned = rows.unflatten(0, (num_heads, -1)).split([num_still, shape.rope.dim], dim=1)
    return (torch.cat([still, turned[:, 0::2], turned[:, 1::2]], dim=1).flatten(),)


PARTS = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_PARTS = ("w1", "w3", "w2")


def build_mlp(weights: _Builder, layer: str, shape: MlpShape) -> Mlp:
    """`layer`: how the names of a layer's weights start."""
    if isinstance(shape, DenseShape) and not shape.gated:
        return _squared(weights, f"{layer}mlp.", biased=shape.bias)
    if isinstance(shape, DenseShape):
        return _dense(weights, f"{layer}mlp.", shape.activation, biased=shape.bias)
    own = "block_sparse_moe." if weights.has(f"{layer}block_sparse_moe.gate.weight") else "mlp."
    return _experts(weights, f"{layer}{own}", shape)


def _experts(weights: _Builder, name: str, shape: ExpertShape) -> ExpertMlp:
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


def _shared(weights: _Builder, name: str, shape: ExpertShape) -> DenseMlp | SquaredMlp:
    return _dense(weights, name, shape.activation) if shape.gated else _squared(weights, name)


def _squared(weights: _Builder, name: str, *, biased: bool = False) -> SquaredMlp:
    up, down = (weights.linear(f"{name}{part}", biased=biased) for part in PARTS[1:])
    return SquaredMlp(up, down)


def _expert_weights(weights: _Builder, name: str, shape: ExpertShape) -> tuple[Weight, Weight]:
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
    weights: _Builder,
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


def build_recurrent(
    source: _Builder, name: str, shape: RecurrentShape, eps: float
) -> RecurrentLayer:
    """`name`: of the layer's weights begins so."""
    match shape:
        case DeltaShape():
            return _delta(source, f"{name}linear_attn.", shape, eps)
        case ConvShape():
            return _conv(source, f"{name}conv.", shape)
        case MambaShape():
            return _mamba(source, f"{name}mamba.", shape)


def _delta(source: _Builder, name: str, shape: DeltaShape, eps: float) -> DeltaLayer:
    if shape.interleaved:
        names = (f"{name}in_proj_{part}" for part in ("qkvz", "ba"))
        project = source.linear(*names, orders=_heads_apart(shape))
    else:
        project = source.linear(*(f"{name}in_proj_{part}" for part in ("qkv", "z", "b", "a")))
    return DeltaLayer(
        shape=shape,
        project=project,
        taps=_taps(source, f"{name}conv1d"),
        decay=-source.take(f"{name}A_log", exact=True).exp(),
        dt_bias=source.take(f"{name}dt_bias", exact=True),
        norm=Norm(source.take(f"{name}norm.weight", exact=True), eps),
        out=source.linear(f"{name}out_proj"),
    )


def _conv(source: _Builder, name: str, shape: ConvShape) -> ConvLayer:
    return ConvLayer(
        shape=shape,
        project=source.linear(f"{name}in_proj", biased=shape.bias),
        taps=_taps(source, f"{name}conv"),
        conv_bias=source.take(f"{name}conv.bias") if shape.bias else None,
        out=source.linear(f"{name}out_proj", biased=shape.bias),
    )


def _mamba(source: _Builder, name: str, shape: MambaShape) -> MambaLayer:
    return MambaLayer(
        shape=shape,
        project=source.linear(f"{name}in_proj", biased=shape.bias, orders=(_z_behind(shape),)),
        taps=_taps(source, f"{name}conv1d"),
        conv_bias=source.take(f"{name}conv1d.bias") if shape.conv_bias else None,
        decay=-source.take(f"{name}A_log", exact=True).exp(),
        dt_bias=source.take(f"{name}dt_bias", exact=True),
        skip=source.take(f"{name}D", exact=True),
        norm=Norm(source.take(f"{name}norm.weight", exact=True), shape.eps),
        out=source.linear(f"{name}out_proj", biased=shape.bias),
    )


def _taps(source: _Builder, name: str) -> torch.Tensor:
    return source.take(f"{name}.weight").flatten(1).T.contiguous()


def _z_behind(shape: MambaShape) -> torch.Tensor:
    """Stored as z, x, B, C, dt; here z is behind what is convolved."""
    sizes = [shape.inner, shape.num_channels, shape.num_heads]
    z, mixed, dt = torch.arange(sum(sizes)).split(sizes)
    return torch.cat([mixed, z, dt])


def _heads_apart(shape: DeltaShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored key head by key head as q, k, values, z and as b, a; here part by part."""
    per_key = shape.num_v_heads // shape.num_k_heads
    v_rows = per_key * shape.v_dim

    def apart(sizes: list[int]) -> torch.Tensor:
        rows = torch.arange(shape.num_k_heads * sum(sizes)).unflatten(0, (shape.num_k_heads, -1))
        return torch.cat([part.flatten() for part in rows.split(sizes, dim=1)])

    return apart([shape.k_dim, shape.k_dim, v_rows, v_rows]), apart([per_key, per_key])
