"""Cohorts: decode rows whose mains were built together, and how they are built anew.

A cohort's arrays are immutable. Rows in it may be shorter than its longest one; the columns past
a row's own length are padding that its mask hides. Windowed layers store only the last window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.packing import KV
from pippin.backends.mlx.row_views import CohortShape, Tree
from pippin.types import GRID

GROUP_COST_TOKENS = 256  # one more group costs a step about as much as this many padded tokens


@dataclass
class Cohort:
    indices: list[int]  # row index of each line of the arrays; -1 once that row has left
    lengths: list[int]  # tokens of each line, counted from the start of its sequence
    stored: list[dict[int, int]]  # by line, by leaf: columns of the arrays that are the line's own
    kv: dict[int, KV]  # by leaf: [lines, heads, columns, dim]
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
                "lines": mx.array(np.maximum(np.array(self.indices, np.int32), 0)),
                "lengths": mx.array(np.array(self.lengths, np.int32)),
                "stored": [mx.array(column) for column in stored],
            }
            self._view = CohortShape(len(self.indices), columns, full), tree
        return self._view

    def columns(self, leaf: int) -> int:
        return int(self.kv[leaf][0].shape[2])

    def main_of(self, index: int, leaf: int) -> KV:
        line = self.indices.index(index)
        n = self.stored[line][leaf]
        keys, values = self.kv[leaf]
        return keys[line : line + 1, :, :n], values[line : line + 1, :, :n]


def group_by_length(lengths: Mapping[int, int]) -> list[list[int]]:
    """Partition rows so that padding plus the cost of having groups is least.

    Rows are sorted by length, so groups are runs; the best partition of the first j rows ends in a
    run i..j for the cheapest i.
    """
    order = sorted(lengths, key=lambda index: lengths[index])
    sizes = [lengths[index] for index in order]
    best: list[tuple[float, int]] = [(0.0, 0)]
    for j in range(1, len(order) + 1):
        best.append(
            min((best[i][0] + (j - i) * sizes[j - 1] + GROUP_COST_TOKENS, i) for i in range(j))
        )
    groups: list[list[int]] = []
    j = len(order)
    while j > 0:
        i = best[j][1]
        groups.append(sorted(order[i:j]))
        j = i
    return groups[::-1]


def regroup(
    layout: Layout,
    groups: Sequence[Sequence[int]],
    cohorts: Sequence[Cohort],
    tails: Mapping[int, KV],
    written: np.ndarray,
) -> list[Cohort]:
    """New cohorts, one per group, each holding what its rows had in main and tail.

    A group may hold -1 for a line that pads it; such a line repeats the group's first row.
    """
    if not tails:
        return []
    home = {index: (c, line) for c in cohorts for line, index in enumerate(c.indices) if index >= 0}
    return [_build(layout, group, home, tails, written) for group in groups]


def _build(
    layout: Layout,
    group: Sequence[int],
    home: Mapping[int, tuple[Cohort, int]],
    tails: Mapping[int, KV],
    written: np.ndarray,
) -> Cohort:
    indices = list(group)
    first = next(index for index in indices if index >= 0)
    group = [first if index < 0 else index for index in indices]
    stored: list[dict[int, int]] = [{} for _ in group]
    lengths = [home[i][0].lengths[home[i][1]] + int(written[i].sum()) for i in group]
    kv = {}
    for leaf in tails:
        window = layout.leaves[leaf].window
        for line, index in enumerate(group):
            cohort, old_line = home[index]
            n = cohort.stored[old_line][leaf] + int(written[index].sum())
            stored[line][leaf] = n if window is None else min(n, window)
        kv[leaf] = _gather(leaf, group, home, tails[leaf], written, [s[leaf] for s in stored])
    return Cohort(indices, lengths, stored, kv)


def _gather(
    leaf: int,
    group: Sequence[int],
    home: Mapping[int, tuple[Cohort, int]],
    tail: KV,
    written: np.ndarray,
    stored: Sequence[int],
) -> KV:
    """Lines of the new array, cohort by cohort: [main | tail] of each, its own columns picked."""
    columns = -(-max(stored) // GRID) * GRID
    parts: list[tuple[list[int], KV]] = []
    sources: dict[int, tuple[Cohort, list[int]]] = {}
    for line, index in enumerate(group):
        cohort = home[index][0]
        sources.setdefault(id(cohort), (cohort, []))[1].append(line)
    for cohort, lines in sources.values():
        main_columns = cohort.columns(leaf)
        pick = np.zeros((len(lines), 1, columns, 1), dtype=np.int32)
        for place, line in enumerate(lines):
            index = group[line]
            own = np.arange(cohort.stored[home[index][1]][leaf])
            new = main_columns + np.flatnonzero(written[index])
            pick[place, 0, : stored[line], 0] = np.concatenate([own, new])[-stored[line] :]
        old_lines = [home[group[line]][1] for line in lines]
        rows = [group[line] for line in lines]
        at = mx.array(pick)
        picked = tuple(
            mx.take_along_axis(
                mx.concatenate(
                    [_lines(cohort.kv[leaf][side], old_lines), _lines(tail[side], rows)], axis=2
                ),
                at,
                axis=2,
            )
            for side in (0, 1)
        )
        parts.append((lines, (picked[0], picked[1])))
    if len(parts) == 1:
        return parts[0][1]
    order = np.argsort(np.concatenate([lines for lines, _ in parts])).astype(np.int32)
    keys, values = (
        mx.take(mx.concatenate([pair[side] for _, pair in parts], axis=0), mx.array(order), axis=0)
        for side in (0, 1)
    )
    return keys, values


def _lines(array: mx.array, lines: Sequence[int]) -> mx.array:
    if list(lines) == list(range(array.shape[0])):
        return array
    return mx.take(array, mx.array(np.array(lines, dtype=np.int32)), axis=0)
