"""What a layer with latent attention (MLA) sees of the decode rows. Knows no particular model."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from pippin.backends.mlx.attention.head_ropes import what_is_left
from pippin.backends.mlx.attention.packed_kv import PackedRowKV
from pippin.backends.mlx.attention.row_kv import RowKV


class LatentKV(RowKV):
    """The view of a layer with latent attention (MLA), as mlx-lm's models write it for one token:

        scores = scaled q · latent + (scaled rotated q · rotated key), which the model itself adds

    A column is [latent: key and value at once | rotated key]. The model gets an identity in place
    of all rotated keys, so what it adds are its rotated queries, and no key is moved.
    `layout.discover` has found that its layers do compute this.
    """

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        super().update_and_fetch(keys, values)
        return keys, _identity(values.shape[-1], values.dtype)

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """`mask`: the rotated queries, scaled, [width, heads, 1, dim]."""
        latents = self._joined(0)
        both = mx.concatenate([queries * scale, mask.astype(queries.dtype)], axis=-1)
        keys = mx.concatenate([latents, self._joined(1)], axis=-1)
        visible = self.step.mask(self.layer_cache, self.layer_cache.window)
        return mx.fast.scaled_dot_product_attention(
            both, keys, latents, scale=1.0, mask=visible, sinks=sinks
        )


class PackedLatentKV(PackedRowKV):
    """The same over packed rows, for one kernel."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._handed_out(keys, values)
        return keys, _identity(values.shape[-1], keys.dtype)

    def make_mask(self, *_: Any, **__: Any) -> None:
        return None

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        assert self._new is not None
        rotated, v, ropes = what_is_left(mask, self._new[1])
        rotated = rotated.astype(queries.dtype)
        return self._by_kernel(queries, self._new[0], v, scale, sinks, ropes, rotated)


@cache
def _identity(size: int, dtype: mx.Dtype) -> mx.array:
    """Made once: every step would make it again."""
    identity = mx.eye(size, dtype=dtype)[None, None]
    mx.eval(identity)
    return identity
