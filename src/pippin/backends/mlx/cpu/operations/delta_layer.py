"""A whole Gated DeltaNet layer between its products as one operation, on CPUs.

    in_proj -> [ conv, silu, norms of q and k, gates, recurrence, gated norm ] -> out_proj

The same arithmetic as mlx-lm's layer, token by token; any other call goes to mlx-lm's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from pippin.backends.mlx.cpu.operations.bindings import Operations, are_float32, operations
from pippin.backends.mlx.recurrent.blocks import BLOCK_TOKENS
from pippin.backends.mlx.recurrent.draft_states import DraftStates
from pippin.backends.mlx.recurrent.replay import ReplayedDeltaNet
from pippin.backends.mlx.recurrent.taps import (
    active_taps,
    record_block_states,
    record_conv_input,
)


class OneOperationDeltaNet(ReplayedDeltaNet):
    """Made over in place by `use_one_operation`."""

    def __call__(
        self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        ours = operations("delta_layer")
        y: mx.array
        if ours is None or not self._takes(inputs, mask, cache):
            y = super().__call__(inputs, mask, cache)
            return y
        if isinstance(cache, DraftStates):
            return self._verify(ours, inputs, cache)
        batch, num_tokens, _ = inputs.shape
        qkv, z = self.in_proj_qkv(inputs), self.in_proj_z(inputs)
        b, a = self.in_proj_b(inputs), self.in_proj_a(inputs)
        conv_state, state, lengths = cache[0], cache[1], cache.lengths
        if conv_state is None:
            conv_state = mx.zeros((batch, self.conv_kernel_size - 1, self.conv_dim))
        if state is None:
            state = mx.zeros((batch, self.num_v_heads, self.head_v_dim, self.head_k_dim))
        tapped = active_taps() is not None
        if tapped:
            record_conv_input(mx.concatenate([conv_state, qkv], axis=1))
        ragged = () if lengths is None else (lengths,)
        num_states = -(-num_tokens // BLOCK_TOKENS) if tapped else 1
        given = (qkv, z, b, a, conv_state, state, *self._weights, *ragged)
        out, cache[0], *states = self._run(ours, given, 2 + num_states)
        record_block_states(states)
        cache[1] = states[-1]
        cache.advance(num_tokens)
        y = self.out_proj(out)
        return y

    def _verify(self, ours: Operations, inputs: mx.array, cache: DraftStates) -> mx.array:
        """One token of each row, and drafts behind it."""
        qkv, z = self.in_proj_qkv(inputs), self.in_proj_z(inputs)
        b, a = self.in_proj_b(inputs), self.in_proj_a(inputs)
        drafts = (*cache.kept, cache.replay.counts)
        given = (qkv, z, b, a, cache[0], cache[1], *self._weights, *drafts)
        out, cache[0], cache[1], *kept = self._run(ours, given, 6 if inputs.shape[1] > 1 else 3)
        cache.kept = kept or cache.kept
        y: mx.array = self.out_proj(out)
        return y

    def folded(self, entries: Sequence[mx.array], num_kept: mx.array) -> list[mx.array]:
        """A state's entries after the first `num_kept` int32 [rows] of the drafts kept in them."""
        conv_state, state, qkv, b, a = entries
        ours = operations("delta_layer")
        if ours is None or not are_float32(*entries):
            return super().folded(entries, num_kept)
        z = mx.zeros((*qkv.shape[:2], self.num_v_heads * self.head_v_dim))
        given = (qkv, z, b, a, conv_state, state, *self._weights, num_kept)
        return self._run(ours, given, 3)[1:]

    def _run(self, ours: Operations, given: Sequence[mx.array], num_made: int) -> list[mx.array]:
        k_heads = self.num_k_heads, self.head_k_dim
        return ours.delta_layer(given, k_heads=k_heads, eps=self.norm.eps, num_made=num_made)

    @property
    def _weights(self) -> tuple[mx.array, ...]:
        return (self.conv1d._taps, self.A_log, self.dt_bias, self.norm.weight)

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
