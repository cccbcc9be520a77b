"""Which drafts rows verify and which they accept, as the device knows it. Knows no model.

A row's drafts are those behind its own length, which the host may know later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from pippin.backends.base import MAX_STOP_IDS, Proposal

NONE = -1  # equals no token that is sampled


@dataclass(frozen=True)
class Proposals:
    """What the host proposes for each row of a step: tokens by position, as one table."""

    starts: np.ndarray  # int32 [rows]: the position of the first
    tokens: np.ndarray  # int32 [rows, n], then NONE

    @classmethod
    def of(cls, proposals: Sequence[Proposal | None]) -> Proposals:
        longest = max((len(found.tokens) for found in proposals if found is not None), default=0)
        table = np.full((len(proposals), longest + 1), NONE, dtype=np.int32)
        starts = np.zeros(len(proposals), dtype=np.int32)
        for row, found in enumerate(proposals):
            if found is not None:
                starts[row] = found.start
                table[row, : len(found.tokens)] = found.tokens
        return cls(starts, table)

    def at(self, positions: mx.array) -> mx.array:
        """int32 [rows, n] of positions [rows, n]; NONE where nothing is proposed."""
        last = self.tokens.shape[1] - 1  # a column of NONE
        place = positions - mx.array(self.starts)[:, None]
        place = mx.where(place < 0, last, mx.minimum(place, last))
        return mx.take_along_axis(mx.array(self.tokens), place, axis=1)


def stop_table(stop_ids: Sequence[tuple[int, ...]]) -> mx.array:
    """int32 [rows, MAX_STOP_IDS]; rows with more ids have no drafts, and need none."""
    table = np.full((len(stop_ids), MAX_STOP_IDS), NONE, dtype=np.int32)
    for row, ids in enumerate(stop_ids):
        few = ids[:MAX_STOP_IDS]
        table[row, : len(few)] = few
    return mx.array(table)


def num_accepted(tokens: mx.array, drafts: mx.array, stop_ids: mx.array) -> mx.array:
    """int32 [rows]: of drafts [rows, depth] those that equal what was sampled before them, tokens
    [rows, depth + 1]; none behind a stop id."""
    sampled = tokens[:, :-1]
    stops = (sampled[:, :, None] == stop_ids[:, None]).any(axis=-1)
    agrees = (sampled == drafts) & ~stops
    return mx.cumprod(agrees.astype(mx.int32), axis=1).sum(axis=1)
