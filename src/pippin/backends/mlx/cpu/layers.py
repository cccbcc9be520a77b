"""Layers on CPUs made over in place, to be one operation of ours each (operations.py).

**Linear layers** have weights that are packed once, when the model is loaded; those that read the
same input are one operation. OpenBLAS packs weights anew for every product, which for the few rows
of a decode step or of a chunk beside streams takes as long as the product itself (panels.h).

**Gated DeltaNet**, all between its products, token by token with the arithmetic of mlx-lm's layer:

    in_proj -> [ conv, silu, norms of q and k, gates, recurrence, gated norm ] -> out_proj

**An MTP head's drafts** of a step: a draft is some eighty small operations of mlx otherwise. For
heads with one dense layer of Qwen3.5's kind; others run theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.qwen3_5 import DecoderLayer
from mlx_lm.models.qwen3_next import Qwen3NextAttention, Qwen3NextMLP

from pippin.backends.mlx.cpu.operations import (
    LinearLayers,
    LinearWeights,
    are_float32,
    frequencies,
    narrowed,
    operations,
    pack,
)
from pippin.backends.mlx.linear_groups import SharedResults
from pippin.backends.mlx.recurrent.recurrences import BLOCK_TOKENS
from pippin.backends.mlx.recurrent.replay import DraftStates, ReplayedDeltaNet
from pippin.backends.mlx.recurrent.taps import active_taps, record_block_states, record_conv_input

EMBEDDINGS = ("embed_tokens", "embeddings", "wte")


class PackedLinear(Linear):
    """mlx's layer, made over in place by `pack_linear_layers`."""

    _num_outputs: int
    _results: SharedResults
    _number: int  # among the layers of its input

    def __call__(self, x: mx.array) -> mx.array:
        if operations() is None or not x.size or not are_float32(x) or "weight" in self:
            y: mx.array = x @ self.weight.T
            return y + self.bias if "bias" in self else y
        return self._results.of(self._number, x)

    @property
    def weight(self) -> mx.array:
        """For code that reads it: unpacked, or what was set since."""
        if "weight" in self:
            set_since: mx.array = self["weight"]
            return set_since
        panels: mx.array = self.panels
        num_inputs = panels.shape[1]
        lines = panels.transpose(0, 2, 1).reshape(-1, num_inputs)[: self._num_outputs]
        return lines.astype(mx.float32)

    @weight.deleter
    def weight(self) -> None:
        """mlx's modules do that before an attribute is set anew."""
        del self.panels

    @property
    def packed(self) -> LinearWeights:
        return LinearWeights(self.panels, self.get("bias"), self._num_outputs)

    @staticmethod
    def of(part: Module) -> PackedLinear:
        """The layer itself, packed."""
        weight = part.pop("weight")
        part.__class__ = PackedLinear
        assert isinstance(part, PackedLinear)
        part._num_outputs = weight.shape[0]
        part.panels = pack(weight)
        mx.eval(part.panels)  # one layer at a time is there twice
        return part


class PackedEmbedding(Embedding):
    """mlx's layer where it is the head too, made over in place by `pack_head`."""

    def __call__(self, x: mx.array) -> mx.array:
        vectors: mx.array = self.lines[x]
        return vectors.astype(mx.float32)

    def as_linear(self, x: mx.array) -> mx.array:
        if operations() is None or not x.size or not are_float32(x):
            return x @ self.weight.T
        logits: mx.array = self._layers(x)[0]
        return logits

    @property
    def weight(self) -> mx.array:  # type: ignore[override]
        """For code that reads it."""
        lines: mx.array = self.lines
        return lines.astype(mx.float32)

    @staticmethod
    def of(part: Module) -> None:
        weight = part.pop("weight")
        part.__class__ = PackedEmbedding
        part.lines = narrowed(weight)
        part.panels = pack(weight)
        part._layers = LinearLayers([LinearWeights(part.panels, None, weight.shape[0])])
        mx.eval(part.lines, part.panels)


def pack_head(model: Module) -> None:
    """Before anything else stands in its place. A model without one of its own reads its
    embedding."""
    if operations() is None:
        return
    parts = {name.split(".")[-1]: part for name, part in model.named_modules()}
    if "lm_head" in parts:
        pack_linear_layers(parts["lm_head"])
        return
    for name in EMBEDDINGS:
        part = parts.get(name)
        if type(part) is Embedding and are_float32(part.weight):
            PackedEmbedding.of(part)


def pack_linear_layers(model: Module, groups: Iterable[Sequence[Module]] = ()) -> None:
    """`groups`: of layers that read the same input, each in one group at most."""
    if operations() is None:
        return
    groups = [*groups]
    grouped = {id(part) for group in groups for part in group}
    groups += [[part] for _, part in model.named_modules() if id(part) not in grouped]
    for group in groups:
        parts = [PackedLinear.of(part) for part in group if _can_be_packed(part)]
        results = SharedResults(LinearLayers([part.packed for part in parts]))
        for number, part in enumerate(parts):
            part._results, part._number = results, number


def _can_be_packed(part: Module) -> bool:
    return type(part) is Linear and are_float32(*part.parameters().values())


class OneOperationDeltaNet(ReplayedDeltaNet):
    """Made over in place by `use_one_operation`."""

    def __call__(
        self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        y: mx.array
        if operations() is None or not self._takes(inputs, mask, cache):
            y = super().__call__(inputs, mask, cache)
            return y
        products = [self.in_proj_qkv(inputs), self.in_proj_z(inputs)]
        products += [self.in_proj_b(inputs), self.in_proj_a(inputs)]
        batch, num_tokens, _ = inputs.shape
        if isinstance(cache, DraftStates):  # one token of each row, and drafts behind it
            drafts = (*cache.kept, cache.replay.counts)
            num_made = 6 if num_tokens > 1 else 3
            out, cache[0], cache[1], *kept = self._run(products, cache.cache, drafts, num_made)
            cache.kept = kept or cache.kept
            y = self.out_proj(out)
            return y
        conv_state, state, lengths = cache[0], cache[1], cache.lengths
        if conv_state is None:
            conv_state = mx.zeros((batch, self.conv_kernel_size - 1, self.conv_dim))
        if state is None:
            state = mx.zeros((batch, self.num_v_heads, self.head_v_dim, self.head_k_dim))
        tapped = active_taps() is not None
        if tapped:
            record_conv_input(mx.concatenate([conv_state, products[0]], axis=1))
        ragged = () if lengths is None else (lengths,)
        num_states = -(-num_tokens // BLOCK_TOKENS) if tapped else 1
        made = self._run(products, (conv_state, state), ragged, 2 + num_states)
        out, cache[0], *states = made
        record_block_states(states)
        cache[1] = states[-1]
        cache.advance(num_tokens)
        y = self.out_proj(out)
        return y

    def folded(self, entries: Sequence[mx.array], num_kept: mx.array) -> list[mx.array]:
        """A state's entries after the first `num_kept` int32 [rows] of the drafts kept in them."""
        conv_state, state, qkv, b, a = entries
        if operations() is None or not are_float32(*entries):
            return super().folded(entries, num_kept)
        z = mx.zeros((*qkv.shape[:2], self.num_v_heads * self.head_v_dim))
        return self._run([qkv, z, b, a], (conv_state, state), (num_kept,), 3)[1:]

    def _run(
        self,
        products: Sequence[mx.array],
        held: Sequence[mx.array],
        others: Sequence[mx.array],
        num_made: int,
    ) -> list[mx.array]:
        """What the output product reads, the convolution's state, and states (cpp/runs.h)."""
        weights = (self.conv1d._taps, self.A_log, self.dt_bias, self.norm.weight)
        sizes = self.num_k_heads, self.head_k_dim, self.norm.eps
        given = (*products, *held, *weights, *others)
        made: list[mx.array] = operations().delta_layer(given, *sizes, num_made)
        return made

    def _takes(self, inputs: mx.array, mask: mx.array | None, cache: Any) -> bool:
        """Rows are masked by their lengths, which the cache has, or not at all."""
        if cache is None or self.sharding_group is not None or not are_float32(inputs):
            return False
        if cache.lengths is None:
            return mask is None
        return cache.left_padding is None and bool(cache.lengths.dtype == mx.int32)


def use_one_operation(model: Module) -> None:
    """Make every layer over that has the form which the operation knows; after `use_replay`."""
    for _, part in model.named_modules():
        if type(part) is not ReplayedDeltaNet:
            continue
        weights = (part.conv1d.weight, part.A_log, part.dt_bias, part.norm.weight)
        products = (part.in_proj_qkv, part.in_proj_z, part.in_proj_b, part.in_proj_a)
        scales = [p.get("scales", p.weight) for p in products]  # of quantized ones
        if are_float32(*weights, *scales) and part.num_v_heads % part.num_k_heads == 0:
            part.__class__ = OneOperationDeltaNet


KV = tuple[mx.array, mx.array]


@dataclass(frozen=True, eq=False)
class HeadOperation:
    weights: tuple[mx.array, ...]  # as draft_head.h lists them
    num_ids: int  # that drafts are chosen among
    eps: float
    rope_scale: float

    def draft(
        self,
        hidden: mx.array,  # [rows, n, hidden]: before each token
        tokens: mx.array,  # int32 [rows, n]
        counts: mx.array,  # int32 [rows]: of these, how many are before a row's last
        first: mx.array,  # int32 [rows]: the place of the first
        kv: KV,  # rings [rows, heads, cells, dim]
        choices: mx.array,  # float32 [rows, 4]
        noise: mx.array,  # uint32 [rows, drafts, 2]
        num_wrong: int,  # cells of a ring that rejected drafts may have been written to
    ) -> tuple[mx.array, KV]:
        """int32 [rows, drafts], and the rings after them."""
        given = (hidden, tokens, counts, first, *kv, choices, noise, *self.weights)
        drafts, keys, values = operations().draft_head(
            given, num_wrong, self.num_ids, self.eps, self.rope_scale
        )
        return drafts, (keys, values)


def find_head_operation(head: Any, embedding: Module, ids: LinearWeights) -> HeadOperation | None:
    """`head`: an MTPHead whose layers are packed; None unless it is as the operation has it."""
    (layer,) = head.layers
    if type(layer) is not DecoderLayer or layer.is_linear or operations() is None:
        return None
    attention, mlp = layer.self_attn, layer.mlp
    if type(attention) is not Qwen3NextAttention or not isinstance(mlp, Qwen3NextMLP):
        return None
    entry = (head.pre_fc_norm_embedding, head.pre_fc_norm_hidden, head.fc, layer.input_layernorm)
    reading = (attention.q_proj, attention.k_proj, attention.v_proj)
    norms = (attention.q_norm, attention.k_norm, attention.o_proj, layer.post_attention_layernorm)
    inner = (mlp.gate_proj, mlp.up_proj, mlp.down_proj, head.norm)
    parts = (*entry, *reading, *norms, *inner)
    found = [_weights_of(part) for part in parts]
    rope, lines = attention.rope, _lines_of(embedding)
    all_eps = {part.eps for part in parts if isinstance(part, RMSNorm)}
    known = type(rope) is RoPE and not rope.traditional and len(all_eps) == 1
    if not known or lines is None or ids.bias is not None or any(w is None for w in found):
        return None
    return HeadOperation(
        (
            lines,
            *(weight for weight in found if weight is not None),
            ids.panels,
            frequencies(rope.dims, rope.base),
        ),
        ids.num_outputs,
        all_eps.pop(),
        rope.scale,
    )


def _weights_of(part: Module) -> mx.array | None:
    if type(part) is PackedLinear and "bias" not in part and "weight" not in part:
        panels: mx.array = part.panels
        return panels
    if isinstance(part, RMSNorm) and are_float32(part.weight):
        weight: mx.array = part.weight
        return weight
    return None


def _lines_of(embedding: Module) -> mx.array | None:
    if isinstance(embedding, PackedEmbedding):
        lines: mx.array = embedding.lines
        return lines
    weight = embedding.get("weight")
    return weight if weight is not None and are_float32(weight) else None
