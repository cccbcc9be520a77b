"""What a layer with latent attention (MLA) sees of the decode rows. Knows no particular model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx

from pippin.backends.mlx.attention.head_ropes import CHANGED, Rope, Unrotated
from pippin.backends.mlx.attention.packed_kv import PackedRowKV
from pippin.backends.mlx.attention.paths import PackedCall
from pippin.backends.mlx.attention.row_kv import RowKV
from pippin.backends.mlx.attention.split_attention import shared_scores


class LatentKV(RowKV):
    """The view of a layer with latent attention (MLA), as mlx-lm's models write it for one token:

        scores = scaled q · latent + (scaled rotated q · rotated key), which the model itself adds

    Over cohorts a piece is [latent: keys and values at once | rotated keys]. The model gets an
    identity in place of all rotated keys, so what it adds are its rotated queries, and no key is
    moved.
    `layout.discover` has found that its layers do compute this.
    """

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        super().update_and_fetch(keys, values)
        return keys, _identity(values.shape[-1], values.dtype)

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def attend_masked(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """`mask`: the rotated queries, scaled, [width, heads, 1, dim]."""
        both = mx.concatenate([queries * scale, mask.astype(queries.dtype)], axis=-1)
        return self.attend(both, 1.0, self.layer_cache.window, sinks)

    def _scores(self, q: mx.array, piece: Sequence[mx.array]) -> mx.array:
        latent, rotated = self._parted(q)
        return latent @ piece[0].swapaxes(-1, -2) + rotated @ piece[1].swapaxes(-1, -2)

    def _shared_scores(self, q: mx.array, piece: Sequence[mx.array]) -> mx.array:
        latent, rotated = self._parted(q)
        return shared_scores(latent, piece[0]) + shared_scores(rotated, piece[1])

    def _values(self, piece: Sequence[mx.array]) -> mx.array:
        return piece[0]

    def _parted(self, q: mx.array) -> tuple[mx.array, mx.array]:
        rank = self.tail[0].shape[-1]
        return q[..., :rank], q[..., rank:]


class PackedLatentKV(PackedRowKV):
    """The same over packed rows, for one kernel."""

    def update_and_fetch(self, keys: mx.array, values: Any) -> tuple[mx.array, mx.array]:
        """`values`: rotated keys, or keys that are yet to be rotated."""
        left = isinstance(values, Unrotated)
        self._rope: Rope | None = values.rope if left else None
        array: mx.array = values.x if left else values
        self._handed_out(keys, array)
        return keys, _identity(array.shape[-1], array.dtype)

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def attend_masked(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        if isinstance(mask, Unrotated) != (self._rope is not None):
            raise TypeError(CHANGED)
        self._asked = mask
        return self.attend(queries, scale, self.layer_cache.window, sinks)

    def _call(self, *given: Any) -> PackedCall:
        call, asked = super()._call(*given), self._asked
        if self._rope is None:
            return replace(call, rotated=asked.astype(call.q.dtype))
        return replace(call, rotated=asked.x, ropes=(asked.rope, self._rope))


@cache
def _identity(size: int, dtype: mx.Dtype) -> mx.array:
    """Made once: every step would make it again."""
    identity = mx.eye(size, dtype=dtype)[None, None]
    mx.eval(identity)
    return identity
