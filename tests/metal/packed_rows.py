"""Rows for packed attention, of keys and values or of latents: what they attend to in float64."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.attention.head_ropes import Rope
from pippin.backends.mlx.attention.packed_rows import MOST_SEGMENTS, AttendPacked, PackedCall

TAIL, CURSOR = 64, 17


class Rows:
    def __init__(
        self,
        lengths: Sequence[int],
        heads: tuple[int, int],
        dim: int,
        seed: int,
        *,
        first: int = 0,
        shared: bool = False,
    ) -> None:
        """`first`: columns of each row that its window has passed by; `shared`: all rows begin with
        the columns of the first."""
        rng = np.random.default_rng(seed)
        width, (q_heads, kv_heads) = len(lengths), heads
        held = np.array(lengths) + first

        def normal(*shape: int) -> np.ndarray:
            return rng.normal(size=shape).astype(np.float32)

        self.q = normal(width, q_heads, 1, dim)
        self.new = normal(2, width, kv_heads, 1, dim)
        self.tails = normal(2, width, kv_heads, TAIL, dim)
        self.mains = normal(2, kv_heads, int(held.sum()) + 37, dim)
        self.visible = rng.random((width, TAIL)) < 0.4
        self.visible[:, CURSOR] = True
        starts = np.zeros(width) if shared else np.concatenate([[0], np.cumsum(held)[:-1]])
        self.places = np.stack([starts + first, lengths], axis=1).astype(np.int32)
        self.sinks = normal(q_heads)
        self.longest = max(lengths)

    def expected(self, *, sinks: bool = False) -> np.ndarray:
        width, q_heads, _, dim = self.q.shape
        repeats = q_heads // self.mains.shape[1]
        tails = self.tails.astype(np.float64)
        tails[:, :, :, CURSOR] = self.new[:, :, :, 0]
        out = np.zeros(self.q.shape)
        for row, head in np.ndindex(width, q_heads):
            start, n = self.places[row]
            keys, values = (
                np.concatenate([main[start : start + n], tail[self.visible[row]]])
                for main, tail in zip(
                    self.mains[:, head // repeats].astype(np.float64),
                    tails[:, row, head // repeats],
                    strict=True,
                )
            )
            scores = keys @ self.q[row, head, 0] * dim**-0.5
            weights = np.exp(scores)
            total = weights.sum() + (np.exp(self.sinks[head]) if sinks else 0.0)
            out[row, head, 0] = weights @ values / total
        return out

    def expected_tails(self) -> Sequence[np.ndarray]:
        tails: np.ndarray = self.tails.copy()
        tails[:, :, :, CURSOR] = self.new[:, :, :, 0]
        return list(tails)

    def see_of_tails(self, what: str) -> None:
        if what != "some":
            self.visible[:] = what == "full"
            self.visible[:, CURSOR] = True

    def round_to(self, dtype: mx.Dtype) -> None:
        """Numbers that this type holds."""
        for name in ("q", "new", "tails", "mains"):
            rounded = mx.array(getattr(self, name)).astype(dtype).astype(mx.float32)
            setattr(self, name, np.array(rounded))

    def cut(self, num_segments: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Rows' columns in so many segments, with large numbers between them."""
        rng = np.random.default_rng(num_segments)
        others = np.full((*self.mains.shape[:2], 3, self.mains.shape[3]), 1e3, np.float32)
        parts: list[list[np.ndarray]] = [[others] for _ in range(num_segments)]
        cut: dict[tuple[int, int], np.ndarray] = {}  # rows that share their columns
        for start, count in map(tuple, self.places):
            if (start, count) in cut:
                continue
            cuts = np.sort(rng.integers(0, count + 1, num_segments - 1))
            pieces = cut[start, count] = np.zeros((MOST_SEGMENTS, 2), np.int32)
            pairs = zip([0, *cuts], [*cuts, count], strict=True)
            for number, (first, last) in enumerate(pairs):
                pieces[number] = sum(part.shape[2] for part in parts[number]), last - first
                parts[number] += [self.mains[:, :, start + first : start + last], others]
        places = np.stack([cut[start, count] for start, count in map(tuple, self.places)])
        return [np.concatenate(part, axis=2) for part in parts], places

    def attend(
        self,
        function: AttendPacked,
        *,
        sinks: bool = False,
        dtype: mx.Dtype = mx.float32,
        num_segments: int = 1,
        ropes: tuple[Rope, Rope] | None = None,
    ) -> list[np.ndarray]:
        def pair(sides: np.ndarray) -> tuple[mx.array, mx.array]:
            return mx.array(sides[0]).astype(dtype), mx.array(sides[1]).astype(dtype)

        segments, places = self.cut(num_segments)
        call = PackedCall(
            mx.array(self.q).astype(dtype),
            *pair(self.new),
            pair(self.tails),
            [pair(segment) for segment in segments],
            mx.array(places),
            mx.array(self.visible),
            mx.full((len(self.q),), CURSOR, mx.int32),
            self.q.shape[-1] ** -0.5,
            mx.array(self.sinks) if sinks else None,
            self.longest,
            mx.arange(len(self.q), dtype=mx.int32) * 997 + 3,
            ropes,
        )
        return [np.array(array.astype(mx.float32)) for array in function(call)]


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
        for sides in (self.new, self.tails, self.mains):
            sides[1] = sides[0]

    def expected(self, *, sinks: bool = False) -> np.ndarray:
        return super().expected(sinks=sinks)[..., : self.dim]

    def expected_tails(self) -> Sequence[np.ndarray]:
        """Latents and rotated keys."""
        return np.split(super().expected_tails()[0], [self.dim], axis=-1)

    def attend(
        self,
        function: AttendPacked,
        *,
        sinks: bool = False,
        dtype: mx.Dtype = mx.float32,
        num_segments: int = 1,
        ropes: tuple[Rope, Rope] | None = None,
    ) -> list[np.ndarray]:
        assert not sinks

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
