"""Rows of latents for packed attention with numbers drawn, and what they attend to in float64."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from metal.packed_rows import CURSOR, Rows
from pippin.backends.mlx.attention.head_ropes import Rope
from pippin.backends.mlx.attention.paths import AttendPacked, PackedCall


class LatentRows(Rows):
    """Columns are [latent | rotated key], and values the latents: of the other side nothing is
    read."""

    def __init__(
        self,
        lengths: Sequence[int],
        num_heads: int,
        dims: tuple[int, int],
        seed: int,
        first: int = 0,
    ) -> None:
        super().__init__(lengths, (num_heads, 1), sum(dims), seed, first=first)
        self.dim = dims[0]
        self.scale = sum(dims) ** -0.5

    def expected(self, *, sinks: bool = False) -> np.ndarray:
        return super().expected(sinks=sinks)[..., : self.dim]

    def round_to(self, dtype: mx.Dtype) -> None:
        super().round_to(dtype)
        self.values_are_keys()

    def values_are_keys(self) -> None:
        for sides in (self.new, self.tails, self.mains):
            sides[1] = sides[0]

    def attend_latents(
        self,
        function: AttendPacked,
        *,
        dtype: mx.Dtype = mx.float32,
        num_segments: int = 1,
        ropes: tuple[Rope, Rope] | None = None,
    ) -> list[np.ndarray]:
        """The output, and the new tail: latents and rotated keys."""

        def pair(side: np.ndarray) -> tuple[mx.array, mx.array]:
            latents, rotated = map(np.ascontiguousarray, np.split(side, [self.dim], axis=-1))
            return mx.array(latents).astype(dtype), mx.array(rotated).astype(dtype)

        segments, places = self.cut(num_segments)
        q, rotated = pair(self.q)
        wide = mx.array(self.q).astype(dtype) * self.scale  # as a model has it: part of a product
        call = PackedCall(
            q,
            *pair(self.new[0]),
            pair(self.tails[0]),
            [pair(segment[0]) for segment in segments],
            mx.array(places),
            mx.array(self.visible),
            mx.full((len(self.q),), CURSOR, mx.int32),
            self.scale,
            None,
            self.longest,
            mx.arange(len(self.q), dtype=mx.int32) * 997 + 3,
            ropes,
            rotated if ropes is not None else wide[..., self.dim :],
        )
        return [np.array(array.astype(mx.float32)) for array in function(call)]
