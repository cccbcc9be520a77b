"""What a layer with latent attention (MLA) sees of the decode rows. Knows no particular model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from pippin.backends.mlx.attention.row_kv import RowKV
from pippin.backends.mlx.attention.split_attention import shared_scores


class LatentKV(RowKV):
    """The view of a layer with latent attention (MLA), as mlx-lm's models write it for one token:

        scores = scaled q · latent + (scaled rotated q · rotated key), which the model itself adds

    A piece is [latent: keys and values at once | rotated keys]. The model is handed an identity in
    place of all rotated keys, so what it adds are its rotated queries, and no key is moved.
    `layout.discover` has found that its layers do compute this.
    """

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        super().update_and_fetch(keys, values)
        return keys, mx.eye(values.shape[-1], dtype=values.dtype)[None, None]

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
