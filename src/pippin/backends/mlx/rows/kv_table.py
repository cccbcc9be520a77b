"""Tells an operation on CPUs where rows' columns lie, as one small array (cpu/cpp).

A step's graph is then the same whichever the rows are and however long. Columns that several rows
name are read for all of them at once, where that saves enough:

    row 0   [ 0 ............ 900 | own ]        together: rows 0 and 1 at [0, 900),
    row 1   [ 0 ............ 900 | own ]        each its own columns by itself
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.cpu.operations import operations
from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.rows.segments import WindowClass

SHARE_COST_TOKENS = 1024  # what reading columns for several rows at once costs beside


class Span(NamedTuple):
    """Columns of a segment, and the rows that read them at once."""

    segment: int
    start: int
    num_columns: int
    rows: list[int]


def read_spans(own: WindowClass) -> Iterator[Span]:
    """What rows read of one window class: each row's own columns in order, and what several read
    at once."""
    for number, segment in enumerate(own.segments):
        named = sorted(
            (piece.start, piece.start + piece.num_columns, index)
            for index, pieces in own.pieces.items()
            for piece in pieces
            if piece.segment is segment
        )
        if all(before[1] <= after[0] for before, after in pairwise(named)):
            for start, end, index in named:
                yield Span(number, start, end - start, [index])
            continue
        bounds = sorted({bound for start, end, _ in named for bound in (start, end)})
        for first, last in pairwise(bounds):
            rows = [index for start, end, index in named if start <= first and last <= end]
            saved = (len(rows) - 1) * (last - first)
            for together in [rows] if saved > SHARE_COST_TOKENS else [[index] for index in rows]:
                yield Span(number, first, last - first, together)


def make_kv_table(layout: Layout, classes: Sequence[WindowClass]) -> mx.array:
    """It keeps the arrays alive as long as itself."""
    arrays: list[mx.array] = []
    numbers = [len(classes)]
    for own in classes:
        spans = list(read_spans(own))
        numbers += [len(own.segments), len(spans)]
        for segment, start, count, rows in spans:
            numbers += [segment, start, count, len(rows), *rows]
    numbers.append(len(layout.kv_indices))
    for cache in layout.kv_indices:
        number, own = next((n, own) for n, own in enumerate(classes) if cache in own.caches)
        arrays += [side for segment in own.segments for side in segment.kv[cache]]
        numbers.append(number)
    table: mx.array = operations().kv_table(arrays, numbers)
    return table


def common_len(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens both begin with."""
    common = min(len(a), len(b))
    differs = a[:common] != b[:common]
    return int(differs.argmax()) if differs.any() else common
