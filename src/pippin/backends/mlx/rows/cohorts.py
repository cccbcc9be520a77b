"""Cohorts: decode rows whose mains were built together, and how they are built anew.

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

from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.rows.grouping import Group
from pippin.backends.mlx.rows.vector_table import Place, VectorTable
from pippin.backends.mlx.rows.views import CohortShape, Tree
from pippin.backends.mlx.tree.packing import KV

COLUMN_STEP = 64  # mains grow by so many columns, so that decode steps have few shapes


@dataclass
class Cohort:
    indices: list[int]  # row index of each line of the arrays; -1 once that row has left
    lengths: list[int]  # tokens of each line, counted from the start of its sequence
    stored: list[dict[int, int]]  # by line, by leaf: columns of the arrays that are the line's own
    kv: dict[int, KV]  # by leaf: [lines, heads, columns, dim]
    shared: dict[int, KV] = field(default_factory=dict)  # by leaf: [1, heads, shared tokens, dim]
    _view: tuple[CohortShape, Tree] | None = field(default=None, repr=False)

    @classmethod
    def of_one(cls, index: int, length: int, stored: dict[int, int], kv: dict[int, KV]) -> Cohort:
        return cls([index], [length], [stored], dict(kv))

    @property
    def num_live(self) -> int:
        return sum(1 for index in self.indices if index >= 0)

    def holds(self, index: int) -> bool:
        return index in self.indices

    def drop(self, index: int) -> None:
        self.indices = [-1 if i == index else i for i in self.indices]

    def renumber(self, new: Mapping[int, int]) -> None:
        self.indices = [new.get(i, -1) for i in self.indices]
        self._view = None

    def view(self, layout: Layout) -> tuple[CohortShape, Tree]:
        """The cohort as a step sees it; the same for all its steps.

        A line whose row has left goes on reading that row, or row 0: nobody looks at it.
        """
        if self._view is None:
            classes = layout.window_classes
            leaves = [next(i for i in self.kv if layout.leaves[i].window == w) for w in classes]
            stored = [np.array([line[leaf] for line in self.stored], np.int32) for leaf in leaves]
            columns = tuple(self.columns(leaf) for leaf in leaves)
            full = tuple(bool((s == c).all()) for s, c in zip(stored, columns, strict=True))
            tree = {
                "kv": [list(self.kv[leaf]) for leaf in layout.kv_indices],
                "shared": [list(self.shared.get(leaf, ())) for leaf in layout.kv_indices],
                "lines": mx.array(np.maximum(np.array(self.indices, np.int32), 0)),
                "lengths": mx.array(np.array(self.lengths, np.int32)),
                "stored": [mx.array(column) for column in stored],
            }
            shared = tuple(self.num_shared(leaf) for leaf in leaves)
            self._view = CohortShape(len(self.indices), columns, full, shared), tree
        return self._view

    def columns(self, leaf: int) -> int:
        return int(self.kv[leaf][0].shape[2])

    def num_shared(self, leaf: int) -> int:
        return int(self.shared[leaf][0].shape[2]) if leaf in self.shared else 0

    def main_of(self, index: int, leaf: int) -> KV:
        """What a row held when the cohort was built: [1, heads, tokens, dim]."""
        line = self.indices.index(index)
        return self._side_of(line, leaf, 0), self._side_of(line, leaf, 1)

    def _side_of(self, line: int, leaf: int, side: int) -> mx.array:
        own = self.kv[leaf][side][line : line + 1, :, : self.stored[line][leaf]]
        if leaf not in self.shared:
            return own
        return mx.concatenate([self.shared[leaf][side], own], axis=2)

    def arrays(self) -> list[mx.array]:
        pairs = (*self.kv.values(), *self.shared.values())
        return [array for pair in pairs for array in pair]


def num_columns(num_tokens: int) -> int:
    return -(-num_tokens // COLUMN_STEP) * COLUMN_STEP


@dataclass(frozen=True)
class Held:
    """What rows hold before they are regrouped."""

    home: Mapping[int, tuple[Cohort, int]]  # by row: its cohort, and its line there
    tails: Mapping[int, KV]
    written: np.ndarray  # bool [width, TAIL]


def regroup(
    layout: Layout,
    groups: Sequence[Group],
    cohorts: Sequence[Cohort],
    tails: Mapping[int, KV],
    written: np.ndarray,
) -> list[Cohort]:
    """New cohorts, one per group, each holding what its rows had in main and tail.

    A line that pads a group repeats the group's first row.
    """
    if not tails:
        return []
    home = {index: (c, line) for c in cohorts for line, index in enumerate(c.indices) if index >= 0}
    return [_build(layout, group, Held(home, tails, written)) for group in groups]


def _build(layout: Layout, group: Group, held: Held) -> Cohort:
    first = next(index for index in group.indices if index >= 0)
    rows = [first if index < 0 else index for index in group.indices]
    homes = [held.home[index] for index in rows]
    new = [int(held.written[index].sum()) for index in rows]
    lengths = [c.lengths[line] + n for (c, line), n in zip(homes, new, strict=True)]
    stored: list[dict[int, int]] = [{} for _ in rows]
    kv, shared = {}, {}
    for leaf in held.tails:
        window = layout.leaves[leaf].window
        num_shared = group.num_shared if window is None else 0
        for own, (c, line), n in zip(stored, homes, new, strict=True):
            tokens = c.num_shared(leaf) + c.stored[line][leaf] + n
            own[leaf] = tokens - num_shared if window is None else min(tokens, window)
        kv[leaf] = _gather(leaf, rows, held, num_shared, [own[leaf] for own in stored])
        if num_shared:
            shared[leaf] = _share(leaf, *homes[0], num_shared)
    return Cohort(list(group.indices), lengths, stored, kv, shared)


def _share(leaf: int, cohort: Cohort, line: int, num_shared: int) -> KV:
    """The first tokens of one line; the very arrays where the cohort already shares so many."""
    if cohort.num_shared(leaf) == num_shared:
        return cohort.shared[leaf]
    keys, values = cohort.main_of(cohort.indices[line], leaf)
    return mx.contiguous(keys[:, :, :num_shared]), mx.contiguous(values[:, :, :num_shared])


def _gather(
    leaf: int, rows: Sequence[int], held: Held, num_shared: int, stored: Sequence[int]
) -> KV:
    """The lines' own columns: what each row holds of main and tail, without what is shared."""
    table = VectorTable()
    tails = table.add(held.tails[leaf])
    mains: dict[int, Place] = {}
    shared: dict[int, Place] = {}
    picked = []
    for index, num_stored in zip(rows, stored, strict=True):
        cohort, line = held.home[index]
        if id(cohort) not in mains:
            mains[id(cohort)] = table.add(cohort.kv[leaf])
            if leaf in cohort.shared:
                shared[id(cohort)] = table.add(cohort.shared[leaf])
        pieces = [
            mains[id(cohort)].vectors(line, np.arange(cohort.stored[line][leaf])),
            tails.vectors(index, np.flatnonzero(held.written[index])),
        ]
        if id(cohort) in shared:
            pieces.insert(0, shared[id(cohort)].vectors(0, np.arange(cohort.num_shared(leaf))))
        picked.append(np.concatenate(pieces, axis=1)[:, -num_stored:])
    return table.take(picked, columns=num_columns(max(stored)))
