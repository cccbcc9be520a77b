"""Cohorts: decode rows whose mains were built together. Knows no steps, and not how they are built.

A cohort's arrays are immutable. Rows in it may be shorter than its longest one; the columns past
a row's own length are padding that its mask hides. Windowed layers store only the last window.
What all rows of a cohort begin with may be held once, for layers without a window:

    keys of one line:   [ shared: one for all lines | the line's own columns | padding ]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.attention.decode_step import CohortShape, Tree
from pippin.backends.mlx.cpu.operations.bindings import Operations
from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.payloads.packing import KV

COLUMN_STEP = 64  # mains grow by so many columns, so that decode steps have few shapes


def num_columns(num_tokens: int) -> int:
    return -(-num_tokens // COLUMN_STEP) * COLUMN_STEP


@dataclass
class Cohort:
    indices: list[int]  # row index of each line of the arrays; -1 once that row has left
    lengths: list[int]  # tokens of each line, counted from the start of its sequence
    stored: list[dict[int, int]]  # by line, by cache: columns of the arrays that are the line's own
    # Keys and values by cache: [lines, heads, columns, dim]; shared ones [1, heads, tokens, dim].
    kv: dict[int, list[mx.array]] = field(default_factory=dict)
    shared: dict[int, list[mx.array]] = field(default_factory=dict)
    _view: tuple[CohortShape, Tree] | None = field(default=None, repr=False)

    @classmethod
    def of_one(cls, index: int, length: int, kv: Mapping[int, KV]) -> Cohort:
        stored = {cache: keys.shape[2] for cache, (keys, _) in kv.items()}
        return cls([index], [length], [stored], {cache: list(pair) for cache, pair in kv.items()})

    @property
    def num_live(self) -> int:
        return sum(1 for index in self.indices if index >= 0)

    @property
    def num_saved(self) -> int:
        """Tokens that live lines do not hold themselves."""
        return max(self.num_live - 1, 0) * max(map(self.num_shared, self.kv), default=0)

    def drop(self, index: int) -> None:
        self.indices = [-1 if i == index else i for i in self.indices]

    def renumber(self, new: Mapping[int, int]) -> None:
        self.indices = [new.get(i, -1) for i in self.indices]
        self._view = None

    def view(self, layout: Layout) -> tuple[CohortShape, Tree]:
        """The cohort as a step sees it; the same for all its steps.

        A line whose row has left still reads that row, or row 0: its result is not used.
        """
        if self._view is None:
            classes = layout.window_classes
            caches = [next(i for i in self.kv if layout.caches[i].window == w) for w in classes]
            stored = [np.array([line[cache] for line in self.stored], np.int32) for cache in caches]
            columns = tuple(self.columns(cache) for cache in caches)
            full = tuple(bool((s == c).all()) for s, c in zip(stored, columns, strict=True))
            tree = {
                "kv": [list(self.kv[cache]) for cache in layout.kv_indices],
                "shared": [list(self.shared.get(cache, ())) for cache in layout.kv_indices],
                "lines": mx.array(np.maximum(np.array(self.indices, np.int32), 0)),
                "lengths": mx.array(np.array(self.lengths, np.int32)),
                "stored": [mx.array(column) for column in stored],
            }
            shared = tuple(self.num_shared(cache) for cache in caches)
            self._view = CohortShape(len(self.indices), columns, full, shared), tree
        return self._view

    def columns(self, cache: int) -> int:
        return int(self.kv[cache][0].shape[2])

    def num_shared(self, cache: int) -> int:
        return int(self.shared[cache][0].shape[2]) if cache in self.shared else 0

    def pieces_of(self, index: int, cache: int) -> list[KV]:
        """What a row held when the cohort was built, in token order: [1, heads, tokens, dim]."""
        line = self.indices.index(index)
        keys, values = self.kv[cache]
        columns = self.stored[line][cache]
        own = keys[line : line + 1, :, :columns], values[line : line + 1, :, :columns]
        if cache not in self.shared:
            return [own]
        keys, values = self.shared[cache]
        return [(keys, values), own]

    def give_up(self, cache: int) -> tuple[list[mx.array], list[mx.array]]:
        """A cache's arrays, own and shared, which the cohort then no longer holds."""
        self._view = None
        return self.kv.pop(cache), self.shared.pop(cache, [])

    def arrays(self) -> list[mx.array]:
        pairs = (*self.kv.values(), *self.shared.values())
        return [array for pair in pairs for array in pair]


def kv_table_of(ours: Operations, layout: Layout, cohorts: Sequence[Cohort]) -> mx.array:
    arrays: list[mx.array] = []
    numbers = [len(layout.kv_indices), len(cohorts)]
    for cohort in cohorts:
        numbers += [len(cohort.indices), *cohort.indices]
    for cache in layout.kv_indices:
        for cohort in cohorts:
            shared = cohort.shared.get(cache, ())
            arrays += [*cohort.kv[cache], *shared]
            numbers += [bool(shared), *(stored[cache] for stored in cohort.stored)]
    return ours.kv_table(arrays, numbers)
