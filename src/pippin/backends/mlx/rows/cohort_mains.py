"""Mains as cohorts: rows of like length side by side, so that plain operations attend to them.

A request joins as a cohort of its own, without a copy of any KV, and its cohort drops it when it
leaves. When the tails are moved, every 64 steps, rows are regrouped by length, so that a step
costs what the rows' real lengths cost, not rows x longest. Rows whose prompts begin alike may then
hold that beginning once (cohorts.py).

Where one operation attends to all cohorts (attention/table_kv.py), their number does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.attention.decode_step import CohortsShape, MainsShape, Tree
from pippin.backends.mlx.attention.paths import AttentionPaths
from pippin.backends.mlx.attention.table_kv import TableShape, table_operations
from pippin.backends.mlx.cpu.operations.bindings import Operations
from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.payloads.packing import KV
from pippin.backends.mlx.rows.cohorts import Cohort, kv_table_of
from pippin.backends.mlx.rows.footprint import SpareLimit
from pippin.backends.mlx.rows.grouping import Group, group_rows
from pippin.backends.mlx.rows.mains import Row, Tails
from pippin.backends.mlx.rows.regrouping import regroup

SCATTERED_STEPS = 8  # after a row joined or left, before rows are regrouped


class CohortMains:
    def __init__(self, layout: Layout, spare: SpareLimit, paths: AttentionPaths) -> None:
        self._layout = layout
        self._spare = spare
        self._paths = paths
        self.cohorts: list[Cohort] = []
        self._steps_left: int | None = None  # until rows are regrouped
        self._kv_table: mx.array | None = None  # of the cohorts as they are

    @property
    def num_groups(self) -> int:
        return len(self.cohorts) if self._table_operations is None else 1

    def join(self, joining: Sequence[tuple[Row, MutableMapping[int, KV]]]) -> None:
        self._kv_table = None
        self.cohorts += [Cohort.of_one(row.index, row.length, kv) for row, kv in joining if kv]
        self._steps_left = self._steps_left or SCATTERED_STEPS

    def leave(self, row: Row) -> None:
        self._kv_table = None
        for cohort in self.cohorts:
            cohort.drop(row.index)
        self.cohorts = [cohort for cohort in self.cohorts if cohort.num_live]
        self._steps_left = self._steps_left or SCATTERED_STEPS

    def pieces_of(self, row: Row, cache: int) -> list[KV]:
        homes = [cohort for cohort in self.cohorts if row.index in cohort.indices]
        return [piece for home in homes for piece in home.pieces_of(row.index, cache)]

    def view(self, positions: np.ndarray, visible: np.ndarray) -> tuple[MainsShape, Tree]:
        ours = self._table_operations
        if ours is not None:
            if self._kv_table is None:
                self._kv_table = kv_table_of(ours, self._layout, self.cohorts)
            return TableShape(), {"kv_table": self._kv_table}
        views = [cohort.view(self._layout) for cohort in self.cohorts]
        width = len(positions)
        shape = CohortsShape(tuple(view[0] for view in views), self._aligned(width), self._paths)
        return shape, {"order": self._order(width), "cohorts": [view[1] for view in views]}

    def want_moving(self, rows: Sequence[Row], width: int, steps_unchanged: int) -> bool:
        if steps_unchanged <= 1 and self._wasteful(width - len(rows)):
            return True
        if self._steps_left is None:
            return False
        self._steps_left -= 1
        if self._steps_left > 0:
            return False
        self._steps_left = None
        return self._scattered(rows, width)

    def absorb(self, rows: Sequence[Row], tails: Tails) -> None:
        self._kv_table = None
        has_table = self._table_operations is not None
        groups = self._groups(rows)
        if not has_table and len(groups) == 1:
            groups = self._with_all_lines(groups, rows, len(tails.written))
        self.cohorts = regroup(self._layout, groups, self.cohorts, tails, has_table=has_table)
        self._steps_left = None

    def renumber(self, new: Mapping[int, int]) -> None:
        self._kv_table = None
        for cohort in self.cohorts:
            cohort.renumber(new)

    def arrays(self) -> list[mx.array]:
        return [array for cohort in self.cohorts for array in cohort.arrays()]

    # ---- inside ----------------------------------------------------------------------------

    @property
    def _table_operations(self) -> Operations | None:
        return table_operations(self._layout)

    def _with_all_lines(self, groups: list[Group], rows: Sequence[Row], width: int) -> list[Group]:
        """One group with a line for every row, if memory allows it: the step gathers nothing."""
        if (width - len(rows)) * max(row.length for row in rows) > self._spare.max_padding:
            return groups
        held = {row.index for row in rows}
        lines = [index if index in held else -1 for index in range(width)]
        return [replace(groups[0], indices=lines)]

    def _scattered(self, rows: Sequence[Row], width: int) -> bool:
        """Fewer cohorts would do, or one whose lines are the rows: such steps are compiled.

        With a KV table they may stay, unless more of them could share what they begin with.
        """
        if self._table_operations is not None:
            saved = sum(group.num_saved for group in self._groups(rows))
            return saved > sum(cohort.num_saved for cohort in self.cohorts)
        if self._aligned(width):
            return False
        num_groups = len(self._groups(rows))
        return num_groups == 1 or num_groups < len(self.cohorts)

    def _wasteful(self, num_spare_lines: int) -> bool:
        padding = sum(map(self._spare.footprint.padding_bytes, self.cohorts))
        return self._spare.is_exceeded(padding, num_spare_lines)

    def _groups(self, rows: Sequence[Row]) -> list[Group]:
        prompts = {row.index: row.prompt for row in rows if row.prompt is not None}
        lengths = {row.index: row.length for row in rows}
        one_pays = self._table_operations is None  # such a step can be compiled
        return group_rows(lengths, prompts, self._spare.max_padding, one_pays=one_pays)

    def _aligned(self, width: int) -> bool:
        if len(self.cohorts) != 1 or len(self.cohorts[0].indices) != width:
            return False
        return all(index in (line, -1) for line, index in enumerate(self.cohorts[0].indices))

    def _order(self, width: int) -> mx.array:
        indices = [index for cohort in self.cohorts for index in cohort.indices]
        order = np.full(width, len(indices), dtype=np.int32)
        for line, index in enumerate(indices):
            if index >= 0:
                order[index] = line
        return mx.array(order)
