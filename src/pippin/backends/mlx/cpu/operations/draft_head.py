"""All drafts that an MTP head leaves in a step as one operation, on CPUs. Knows no rows.

A draft is some eighty small operations of mlx otherwise, which cost the host and mlx's thread more
than what they compute. For heads with one dense layer of Qwen3.5's kind; others run theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.positional_encoding import RoPE
from mlx_lm.models.qwen3_5 import DecoderLayer
from mlx_lm.models.qwen3_next import Qwen3NextAttention, Qwen3NextMLP

from pippin.backends.mlx.cpu.operations.bindings import LinearWeights, are_float32, operations
from pippin.backends.mlx.cpu.operations.drop_ins import frequencies
from pippin.backends.mlx.cpu.operations.linear import PackedEmbedding, PackedLinear

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
        ours = operations("draft_head")
        assert ours is not None, "it was found when the head was packed"
        step = (hidden, tokens, counts, first, *kv, choices, noise)
        drafts, keys, values = ours.draft_head(
            (*step, *self.weights), num_wrong, self.num_ids, self.eps, self.rope_scale
        )
        return drafts, (keys, values)


def find_head_operation(head: Any, embedding: Module, ids: LinearWeights) -> HeadOperation | None:
    """`head`: an MTPHead whose layers are packed; None unless it is as the operation has it."""
    (layer,) = head.layers
    if type(layer) is not DecoderLayer or layer.is_linear or operations("draft_head") is None:
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
        (lines, *_present(found), ids.panels, frequencies(rope.dims, rope.base)),
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


def _present(found: Sequence[mx.array | None]) -> list[mx.array]:
    return [weight for weight in found if weight is not None]
