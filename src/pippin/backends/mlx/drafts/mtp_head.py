"""The checkpoint's MTP head beside the model: mlx-lm drops its weights.

What it computes is in backends/mtp_weights.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import RMSNorm
from mlx.utils import tree_flatten

from pippin.backends.mlx import substitutions
from pippin.backends.mlx.cpu.layers import (
    HeadOperation,
    PackedEmbedding,
    PackedLinear,
    find_head_operation,
)
from pippin.backends.mlx.cpu.operations import LinearLayers, LinearWeights, operations
from pippin.backends.mlx.drafts.rings import RingKV, RingLayer, RingShape
from pippin.backends.mtp_weights import LAYER, PREFIX, STORED_LESS_ONE, find_mtp_weights

# Ids that drafts are chosen among: the first. Tokenizers number frequent tokens first, and a wrong
# draft costs time alone.
MAX_DRAFT_VOCAB = 1 << 11
RING = 32  # tokens of a row whose keys are kept


class MTPHead(Module):
    """`layer`: one of the model's kind, with full attention."""

    def __init__(self, layer: Module, text: Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        norm, hidden = text.model.norm, text.model.norm.weight.shape[0]
        self.fc = Linear(2 * hidden, hidden, bias=False)
        self.layers = [layer]
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (
            RMSNorm(hidden, eps=norm.eps) for _ in range(3)
        )
        self._text = text  # embedding and head are the model's

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Heads, and their channels."""
        attention = self.layers[0].self_attn
        return attention.num_key_value_heads, attention.head_dim

    @property
    def vocab_size(self) -> int:
        return int(self._text.args.vocab_size)

    def run_once(self) -> None:
        """One token."""
        hidden = mx.zeros((1, 1, self.norm.weight.shape[0]), self.fc.weight.dtype)
        self.layers[0](self.inputs(hidden, mx.zeros((1, 1), mx.int32)))

    def inputs(self, hidden: mx.array, tokens: mx.array) -> mx.array:
        embedded = self.pre_fc_norm_embedding(self._text.model.embed_tokens(tokens))
        joined: mx.array = self.fc(
            mx.concatenate([embedded, self.pre_fc_norm_hidden(hidden)], axis=-1)
        )
        return joined

    def ring_shape(self, max_depth: int) -> RingShape:
        sides = self.kv_shape
        layer = RingLayer(sides, sides, self.norm.weight.dtype)
        return RingShape((layer,), RING, 0, num_wrong=max_depth)

    def read(
        self,
        hidden: mx.array | None,
        tokens: mx.array,
        caches: Sequence[RingKV],
        at: mx.array,
    ) -> tuple[mx.array, mx.array]:
        assert hidden is not None
        (cache,) = caches
        with substitutions.active():
            entered = self.inputs(hidden, tokens)
            out = self.norm(self.layers[0](entered, cache.make_mask(tokens.shape[1]), cache))
            last = mx.take_along_axis(out, at[:, None, None], axis=1)
            return self.logits(last)[:, 0], last

    def logits(self, hidden: mx.array) -> mx.array:
        """Of the first ids, as many as drafts are chosen among."""
        if operations() is not None and self._first_ids is not None:
            return self._first_ids(hidden)[0]
        head = self._text.model.embed_tokens.as_linear if self._tied else self._text.lm_head
        logits: mx.array = head(hidden)
        return logits

    @property
    def operation(self) -> HeadOperation | None:
        return None if operations() is None else self._operation

    def pack(self) -> None:
        """After the model's own head is packed."""
        self._operation: HeadOperation | None = None
        part = self._text.model.embed_tokens if self._tied else self._text.lm_head
        self._first_ids = None
        if isinstance(part, PackedEmbedding | PackedLinear) and "bias" not in part:
            panels = part.panels[: MAX_DRAFT_VOCAB // part.panels.shape[2]]
            mx.eval(panels)
            size = min(MAX_DRAFT_VOCAB, self._text.args.vocab_size)
            ids = LinearWeights(panels, None, size)
            self._first_ids = LinearLayers([ids])
            self._operation = find_head_operation(self, self._text.model.embed_tokens, ids)

    @property
    def _tied(self) -> bool:
        return bool(self._text.args.tie_word_embeddings)


def load_mtp_head(path: Path, model: Module, model_type: str) -> MTPHead | str:
    """With weights as they are stored; or why there is none."""
    stored: dict[str, mx.array] = {}
    for part in sorted(path.glob("*.safetensors")):
        found: Any = mx.load(str(part))  # nothing is read yet but names and shapes
        stored |= found
    return make_mtp_head(stored, model, model_type)


def make_mtp_head(stored: Mapping[str, mx.array], model: Module, model_type: str) -> MTPHead | str:
    """`stored`: all weights of the checkpoint, by name."""
    names = find_mtp_weights(model_type, stored)
    if isinstance(names, str):
        return names
    text: Any = getattr(model, "language_model", model)
    number = text.args.full_attention_interval - 1
    if number >= len(text.model.layers):
        return "the model has no layer with full attention"
    head = MTPHead(type(text.model.layers[number])(text.args, number), text)
    weights = _renamed({name: stored[PREFIX + name] for name in names})
    if _stored_as_published(stored):
        less_one = STORED_LESS_ONE
        weights = {n: w + 1.0 if less_one.search(n) else w for n, w in weights.items()}
    module: Module = head
    own: Any = tree_flatten(module.parameters())
    expected = {name: array.shape for name, array in own}
    differs = sorted({(n, w.shape) for n, w in weights.items()} ^ set(expected.items()))
    if differs:
        return f"its MTP head does not fit the model: {PREFIX}{differs[0][0]}"
    head.load_weights(list(weights.items()))
    head.eval()
    return head


def _renamed(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Experts as mlx-lm has them: of all of them one array a product."""
    mlp = f"{LAYER}mlp."
    one = re.compile(re.escape(mlp) + r"experts\.(\d+)\.(\w+)\.weight")
    by_product: dict[str, dict[int, mx.array]] = {}
    found: dict[str, mx.array] = {}
    for name, weight in weights.items():
        if (match := one.fullmatch(name)) is not None:
            by_product.setdefault(match[2], {})[int(match[1])] = weight
        elif name == f"{mlp}experts.gate_up_proj":
            gate, up = mx.split(weight, 2, axis=-2)
            found |= {f"{mlp}switch_mlp.gate_proj.weight": gate}
            found |= {f"{mlp}switch_mlp.up_proj.weight": up}
        elif name == f"{mlp}experts.down_proj":
            found[f"{mlp}switch_mlp.down_proj.weight"] = weight
        else:
            found[name] = weight
    for product, experts in by_product.items():
        stacked = mx.stack([experts[number] for number in sorted(experts)])
        found[f"{mlp}switch_mlp.{product}.weight"] = stacked
    return found


def _stored_as_published(stored: Mapping[str, mx.array]) -> bool:
    """Not as mlx-lm writes checkpoints, which adds the one to norms."""
    taps = (array for name, array in stored.items() if name.endswith("conv1d.weight"))
    return any(array.shape[-1] != 1 for array in taps)
