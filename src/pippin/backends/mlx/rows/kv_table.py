"""Tells an operation on CPUs where rows' columns lie, as one small array (cpu/operations/cpp).

A step's graph is then the same whichever the rows are and however long. Columns that several rows
name are read for all of them at once, where that saves enough:

    row 0   [ 0 ............ 900 | own ]        together: rows 0 and 1 at [0, 900),
    row 1   [ 0 ............ 900 | own ]        each its own columns by itself
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.cpu.operations.bindings import Operations
from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.rows.segments import WindowClass

SHARE_COST_TOKENS = 1024  # what reading columns for several rows at once costs beside


class Span(NamedTuple):
    """Columns of a segment."""

    segment: int
    start: int
    num_columns: int


@dataclass
class Reading:
    """Who reads which columns of one window class."""

    own: dict[int, list[Span]] = field(default_factory=lambda: defaultdict(list))  # by row
    together: list[tuple[Span, list[int]]] = field(default_factory=list)

    @classmethod
    def of(cls, own: WindowClass) -> Reading:
        found = cls()
        numbers = {id(segment): number for number, segment in enumerate(own.segments)}
        named: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # by segment: of a row
        for index, pieces in own.pieces.items():
            for segment, start, count in pieces:
                named[numbers[id(segment)]].append((start, start + count, index))
        for number in range(len(own.segments)):
            found._add(number, sorted(named[number]))
        return found

    def _add(self, segment: int, named: Sequence[tuple[int, int, int]]) -> None:
        if all(before[1] <= after[0] for before, after in pairwise(named)):
            for start, end, index in named:
                self.own[index].append(Span(segment, start, end - start))
            return
        bounds = sorted({bound for start, end, _ in named for bound in (start, end)})
        for first, last in pairwise(bounds):
            rows = [index for start, end, index in named if start <= first and last <= end]
            span = Span(segment, first, last - first)
            if (len(rows) - 1) * span.num_columns > SHARE_COST_TOKENS:
                self.together.append((span, rows))
            else:
                for index in rows:
                    self.own[index].append(span)

    def numbers(self) -> list[int]:
        """As kv_table.h reads them."""
        found = [len(self.together)]
        for span, rows in self.together:
            found += [*span, len(rows), *rows]
        found.append(len(self.own))
        for index, spans in self.own.items():
            found += [index, len(spans), *(number for span in spans for number in span)]
        return found


def make_kv_table(ours: Operations, layout: Layout, classes: Sequence[WindowClass]) -> mx.array:
    arrays: list[mx.array] = []
    numbers = [len(classes)]
    for own in classes:
        numbers += [len(own.segments), *Reading.of(own).numbers()]
    numbers.append(len(layout.kv_indices))
    for cache in layout.kv_indices:
        number, own = next((n, own) for n, own in enumerate(classes) if cache in own.caches)
        arrays += [side for segment in own.segments for side in segment.kv[cache]]
        numbers.append(number)
    return ours.kv_table(arrays, numbers)


def common_len(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens both begin with."""
    common = min(len(a), len(b))
    differs = a[:common] != b[:common]
    return int(differs.argmax()) if differs.any() else common
