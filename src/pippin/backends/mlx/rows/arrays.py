"""What decode rows have beside their mains: tails and recurrent states, arrays with a line per row.

Knows no slots and no steps. Lines that no row has are computed along and mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.layout import LayerCache, Layout
from pippin.backends.mlx.payloads.packing import KV
from pippin.backends.mlx.recurrent.replay import kept_shapes

TAIL = 64  # columns: steps from one move into mains to the next


@dataclass
class RowArrays:
    layout: Layout
    max_depth: int = 0  # of drafts, of which states keep inputs behind their own entries
    width: int = 0
    tails: dict[int, list[mx.array]] = field(default_factory=dict)  # by cache, see `_blanks`
    states: dict[int, list[mx.array]] = field(default_factory=dict)

    def arrays(self) -> list[mx.array]:
        caches = (*self.tails.values(), *self.states.values())
        return [array for entries in caches for array in entries]

    def take_over(self, tails: Sequence[KV], states: Sequence[list[mx.array]]) -> None:
        """What a step made of them, in the layout's order."""
        self.tails = dict(zip(self.layout.kv_indices, map(list, tails), strict=True))
        self.states = dict(zip(self.layout.state_indices, states, strict=True))

    def tail_of(self, cache: int, line: int, num_columns: int) -> KV:
        keys, values = (side[line : line + 1, :, :num_columns] for side in self.tails[cache])
        return keys, values

    def states_of(self, line: int) -> dict[int, list[mx.array]]:
        """In buffers of their own: a view would keep every line's alive."""
        return {
            cache: [mx.contiguous(entry[line : line + 1]) for entry in entries]
            for cache, entries in self.states.items()
        }

    def clear(self, lines: Sequence[int]) -> None:
        """For new rows. A masked column has weight 0, but 0 times inf is NaN: what the last row
        left in a tail must be cleared; in memory of its own while that is still to be captured."""
        is_new = mx.array(np.isin(np.arange(self.width), lines))[:, None, None, None]
        for cache, sides in self.tails.items():
            self.tails[cache] = [mx.where(is_new, 0, side) for side in sides]

    def begin_tails(self) -> None:
        """Empty, in memory of their own: the move of the old ones may not have read them yet, and
        on CPUs a column is written in place."""
        for index in self.tails:
            self.tails[index] = self._blanks(self.layout.caches[index], self.width)

    def put_states(self, line: int, states: dict[int, list[mx.array]]) -> None:
        for cache, entries in states.items():
            for number, entry in enumerate(entries):
                if self.width == 1:
                    self.states[cache][number] = entry
                else:
                    self.states[cache][number][line : line + 1] = entry

    def widen(self, width: int) -> None:
        """New lines are zeros."""
        extra = width - self.width
        for index, cache in enumerate(self.layout.caches):
            held = self.states if cache.is_state else self.tails
            blanks = self._blanks(cache, extra)
            old = zip(held[index], blanks, strict=True) if index in held else None
            held[index] = blanks if old is None else [mx.concatenate(list(pair)) for pair in old]
        self.width = width

    def choose(self, lines: Sequence[int]) -> None:
        """Keep only these lines, in this order."""
        at = mx.array(np.array(lines, dtype=np.int32))
        for held in (self.tails, self.states):
            for cache, entries in held.items():
                held[cache] = [mx.take(entry, at, axis=0) for entry in entries]
        self.width = len(lines)

    def _blanks(self, cache: LayerCache, num_lines: int) -> list[mx.array]:
        """A state's entries [lines, ...], or a tail's keys and values [lines, heads, TAIL, dim]."""
        shapes: list[tuple[int, ...]] = list(cache.shapes)
        if not cache.is_state:
            shapes = [(heads, TAIL, dim) for heads, dim in cache.shapes]
        found = [
            mx.zeros((num_lines, *shape), dtype)
            for shape, dtype in zip(shapes, cache.dtypes, strict=True)
        ]
        kept = kept_shapes(cache, self.max_depth) if cache.is_state else []
        return found + [mx.zeros((num_lines, *shape), cache.dtypes[0]) for shape in kept]
