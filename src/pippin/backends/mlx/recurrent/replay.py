"""Gated DeltaNet over drafts: what a step accepted is replayed from its inputs.

    [ conv state | accepted drafts of the last step | input token | drafts ]
                   kept: their inputs                 state here    inputs are kept

The state behind the input token is written, which is always accepted. Of the drafts behind it their
inputs are kept: the next step runs first those that were accepted, and so does what captures the
row. No state per draft. On any device in operations of mlx, and mlx-lm's kernel where there is one;
all rows have as many tokens: those of drafts that were not accepted come first, and are masked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import silu
from mlx.nn.layers.base import Module
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import ArraysCache

from pippin.backends.mlx.layout import LayerCache
from pippin.backends.mlx.recurrent.recurrences import gated_delta_update


class Replay:
    """Which of the kept drafts a step runs first, and where, for all layers."""

    def __init__(self, counts: mx.array, num_kept: int, num_new: int) -> None:
        """`counts` int32 [rows]: how many of `num_kept` were accepted; `num_new` tokens follow."""
        self.counts = counts
        self._missing = (num_kept - counts)[:, None]
        self._num_kept, self._num_new = num_kept, num_new
        self._orders: dict[int, mx.array] = {}

    def moved(self, parts: Sequence[mx.array]) -> mx.array:
        """Parts [rows, n, ...] side by side: what is kept, new ones, and perhaps some before. The
        accepted of the kept ones, and those before, are moved next to the new ones."""
        joined = mx.concatenate(list(parts), axis=1)
        size, num_old = joined.shape[1], joined.shape[1] - self._num_new
        if size not in self._orders:
            place = mx.arange(size)[None]
            moved = mx.maximum(place - self._missing, 0)
            self._orders[size] = mx.where(place < num_old, moved, place)[..., None]
        return mx.take_along_axis(joined, self._orders[size], axis=1)

    @cached_property
    def is_replayed(self) -> mx.array:
        """bool [rows, kept and new]: accepted, or the input token."""
        return (self._place >= self._missing) & (self._place <= self._num_kept)

    @cached_property
    def is_draft(self) -> mx.array:
        is_draft = mx.broadcast_to(self._place > self._num_kept, self.is_replayed.shape)
        return mx.contiguous(is_draft)

    @cached_property
    def _place(self) -> mx.array:
        return mx.arange(self._num_kept + self._num_new)[None]


class DraftStates(ArraysCache):
    """A layer's state entries, before and after the step, and what is kept of drafts."""

    def __init__(self, cache: LayerCache, entries: Sequence[mx.array], replay: Replay) -> None:
        num_entries = len(cache.shapes)
        super().__init__(size=num_entries)
        self.cache: Any = list(entries[:num_entries])
        self.kept = list(entries[num_entries:])  # as `kept_shapes` has them
        self.replay = replay

    def entries(self) -> list[mx.array]:
        return [*self.cache, *self.kept]


def kept_shapes(cache: LayerCache, max_depth: int) -> list[tuple[int, ...]]:
    """Of a Gated DeltaNet layer, per row: inputs of the convolution and of the gates."""
    if not max_depth:
        return []
    (_, channels), (heads, *_) = cache.shapes
    return [(max_depth, channels), (max_depth, heads), (max_depth, heads)]


def kept_bytes(cache: LayerCache, max_depth: int) -> int:
    """Of the type of the convolution's state."""
    return sum(cache.dtypes[0].size * depth * size for depth, size in kept_shapes(cache, max_depth))


class ReplayedDeltaNet(qwen3_5.GatedDeltaNet):
    """mlx-lm's layer, made over in place by `use_replay`."""

    def __call__(
        self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        if isinstance(cache, DraftStates):
            return self._verify_plain(inputs, cache)
        y: mx.array = super().__call__(inputs, mask, cache)
        return y

    def _verify_plain(self, inputs: mx.array, cache: DraftStates) -> mx.array:
        """One token of each row, and drafts behind it."""
        batch, num_new, _ = inputs.shape
        qkv, z = self.in_proj_qkv(inputs), self.in_proj_z(inputs)
        b, a = self.in_proj_b(inputs), self.in_proj_a(inputs)
        num_kept, num_before = cache.kept[0].shape[1], self.conv_kernel_size - 1
        replay = cache.replay
        conv_input = replay.moved([cache[0], cache.kept[0], qkv])
        gates = [replay.moved([old, new]) for old, new in zip(cache.kept[1:], (b, a), strict=True)]
        cache[0] = mx.contiguous(conv_input[:, num_kept + 1 : num_kept + 1 + num_before])
        tokens = (*self._qkv(conv_input), *gates)
        out, cache[1] = self._update(tokens, cache[1], replay.is_replayed)
        out = out[:, num_kept:]
        if num_new > 1:
            drafts, _ = self._update(tokens, cache[1], replay.is_draft)
            out = mx.where(replay.is_draft[:, num_kept:, None, None], drafts[:, num_kept:], out)
            cache.kept = [
                mx.concatenate([new[:, 1:], old[:, num_new - 1 :]], axis=1)
                for new, old in zip((qkv, b, a), cache.kept, strict=True)
            ]
        gated = self.norm(out, z.reshape(batch, num_new, self.num_v_heads, self.head_v_dim))
        y: mx.array = self.out_proj(gated.reshape(batch, num_new, -1))
        return y

    def folded(self, entries: Sequence[mx.array], num_kept: mx.array) -> list[mx.array]:
        """A state's entries after the first `num_kept` int32 [rows] of the drafts kept in them."""
        conv_state, state, qkv, b, a = entries
        conv_input = mx.concatenate([conv_state, qkv], axis=1)
        accepted = mx.arange(qkv.shape[1])[None] < num_kept[:, None]
        _, state = self._update((*self._qkv(conv_input), b, a), state, accepted)
        at = num_kept[:, None] + mx.arange(conv_state.shape[1])
        return [mx.take_along_axis(conv_input, at[..., None], axis=1), state]

    def _qkv(self, conv_input: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """[rows, tokens, heads, channels] each, of tokens and as many before as there are taps."""
        conv_out = silu(self.conv1d(conv_input))
        parts = mx.split(conv_out, [self.key_dim, 2 * self.key_dim], -1)
        heads = [(self.num_k_heads, self.head_k_dim)] * 2 + [(self.num_v_heads, self.head_v_dim)]
        q, k, v = (
            part.reshape(*part.shape[:2], *own) for part, own in zip(parts, heads, strict=True)
        )
        normalize: Any = vars(qwen3_5)["normalize_qk"]  # ours, where it was substituted
        q, k = normalize(q, k, inv_scale=self.head_k_dim**-0.5, eps=1e-6)
        return q, k, v

    def _update(
        self, tokens: tuple[mx.array, ...], state: mx.array, mask: mx.array
    ) -> tuple[mx.array, mx.array]:
        """What tokens that are not masked read, and the state after them."""
        q, k, v, b, a = tokens
        return gated_delta_update(q, k, v, a, b, self.A_log, self.dt_bias, state, mask)


def use_replay(model: Module) -> None:
    """Make every layer over that has the form which is known here; after its convolution."""
    for _, part in model.named_modules():
        if type(part) is qwen3_5.GatedDeltaNet and "bias" not in part.conv1d:
            part.__class__ = ReplayedDeltaNet


def delta_layers(model: Module, layers: Sequence[int]) -> list[ReplayedDeltaNet] | None:
    """The recurrent part of each of these layers; None unless all have one that takes drafts."""
    found: dict[int, ReplayedDeltaNet] = {}
    for name, part in model.named_modules():
        number = re.search(r"\blayers\.(\d+)\.", name)
        if number is not None and isinstance(part, ReplayedDeltaNet):
            found[int(number[1])] = part
    return [found[layer] for layer in layers] if found.keys() >= set(layers) else None
