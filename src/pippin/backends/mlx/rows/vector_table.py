"""Builds one KV array of vectors that lie in several. Knows no rows and no cohorts.

Arrays [lines, heads, columns, dim] are laid one after the other as a table of vectors, and the new
array is one `mx.take` from it. `mx.take_along_axis` would go number by number: three times as long
on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.tree.packing import KV


@dataclass(frozen=True)
class Place:
    """Where in the table an array lies."""

    start: int
    heads: int
    columns: int

    def vectors(self, line: int, columns: np.ndarray) -> np.ndarray:
        """[2, n]: where the first head's vectors of these columns are, and each next head's from
        there."""
        first = self.start + line * self.heads * self.columns + columns
        return np.stack([first, np.full_like(first, self.columns)])


class VectorTable:
    def __init__(self) -> None:
        self._pairs: list[KV] = []
        self._size = 0

    def add(self, pair: KV) -> Place:
        lines, heads, columns, _ = pair[0].shape
        assert pair[1].shape[:3] == (lines, heads, columns), "keys and values lie alike"
        place = Place(self._size, heads, columns)
        self._pairs.append(pair)
        self._size += lines * heads * columns
        return place

    def take(self, picked: Sequence[np.ndarray], columns: int) -> KV:
        """`picked`: by line, 1 to `columns` of `Place.vectors`.

        The rest of a line is padding: its first vector, again and again. No line may hold anything
        of another's: weighed with nothing it would still spoil it, if it is not a number.
        """
        at = np.empty((2, len(picked), 1, columns), dtype=np.int32)
        for line, vectors in enumerate(picked):
            at[:, line, 0] = vectors[:, :1]
            at[:, line, 0, : vectors.shape[1]] = vectors
        heads = mx.arange(self._pairs[0][0].shape[1])[:, None]
        numbers = mx.array(at[0]) + mx.array(at[1]) * heads  # [lines, heads, columns]
        return self._side(0, numbers), self._side(1, numbers)

    def _side(self, side: int, numbers: mx.array) -> mx.array:
        flat = [pair[side].reshape(-1, pair[side].shape[3]) for pair in self._pairs]
        return mx.take(mx.concatenate(flat), numbers, axis=0)
