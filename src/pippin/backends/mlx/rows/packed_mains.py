"""Mains packed: the columns of all rows one after the other, in a few segments per layer and side.

Nothing is padded, rows of all lengths cost what they hold, and a step has few shapes: how many rows
there are and how large the segments are, the latter by a ladder. For devices where a kernel attends
to it (gpu/packed_attention.py). A row that joins is copied once, and no other row is
(segments.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.attention.decode_step import Tree
from pippin.backends.mlx.attention.packed_kv import PackedShape
from pippin.backends.mlx.attention.paths import AttentionPaths
from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.payloads.packing import KV
from pippin.backends.mlx.rows.footprint import MOVING_SHARE, SpareLimit
from pippin.backends.mlx.rows.mains import Row, Tails
from pippin.backends.mlx.rows.regrouping import PacedLaunch
from pippin.backends.mlx.rows.segments import Segment, WindowClass
from pippin.backends.mlx.shapes import at_least

FEWEST_COLUMNS = 256  # of a segment


class PackedMains:
    num_groups = 1

    def __init__(self, layout: Layout, spare: SpareLimit, paths: AttentionPaths) -> None:
        self._layout = layout
        self._spare = spare
        self._paths = paths
        self._classes = [
            WindowClass(w, own, chunked=layout.caches[own[0]].chunked)
            for w in layout.window_classes
            if (own := [i for i in layout.kv_indices if layout.caches[i].window == w])
        ]
        # By cache, by segment: [heads, capacity, dim], both sides.
        self._kv: dict[int, list[list[mx.array]]] = {index: [] for index in layout.kv_indices}

    def join(self, joining: Sequence[tuple[Row, MutableMapping[int, KV]]]) -> None:
        for own in self._classes:
            segment = Segment()
            for row, kv in joining:
                segment.append(row.index, kv[own.caches[0]][0].shape[2])
                own.ends[row.index] = row.length
            self._add(own, segment, lambda cache: [kv.pop(cache) for _, kv in joining])

    def leave(self, row: Row) -> None:
        for own in self._classes:
            own.leave(row.index)
            self._drop_empty(own)

    def pieces_of(self, row: Row, cache: int) -> list[KV]:
        own = next(own for own in self._classes if cache in own.caches)
        found: list[KV] = []
        for number, (start, count) in own.pieces_of(row.index):
            keys, values = (
                side[None, :, start : start + count] for side in self._kv[cache][number]
            )
            found.append((keys, values))
        return found

    def view(self, positions: np.ndarray, visible: np.ndarray) -> tuple[PackedShape, Tree]:
        shape = PackedShape(
            tuple(tuple(part.capacity for part in own.segments) for own in self._classes),
            tuple(at_least(own.longest) for own in self._classes),
            self._paths,
        )
        tree = {
            "places": [mx.array(own.table(positions)) for own in self._classes],
            "visible": [mx.array(_seen(visible, own, positions)) for own in self._classes],
            "mains": [
                [list(pair) for pair in self._kv[cache]] for cache in self._layout.kv_indices
            ],
        }
        return shape, tree

    def want_moving(self, rows: Sequence[Row], width: int, steps_unchanged: int) -> bool:
        num_spare_lines = width - len(rows)
        return steps_unchanged <= 1 and self._spare.is_exceeded(self._spare_bytes, num_spare_lines)

    def absorb(self, rows: Sequence[Row], tails: Tails) -> None:
        merges = self._spare.is_exceeded(self._spare_bytes, 0)
        for own in self._classes:
            self._append_tails(own, tails)
            if merges:
                self._merge(own, 0, len(own.segments))

    def renumber(self, new: Mapping[int, int]) -> None:
        for own in self._classes:
            own.renumber(new)

    def arrays(self) -> list[mx.array]:
        return [side for parts in self._kv.values() for pair in parts for side in pair]

    # ---- inside ----------------------------------------------------------------------------

    @property
    def _spare_bytes(self) -> int:
        """Of columns that belong to no row."""
        by_window = self._spare.footprint.bytes_by_window
        return sum((own.capacity - own.num_held) * by_window[own.window] for own in self._classes)

    def _append_tails(self, own: WindowClass, tails: Tails) -> None:
        written = {index: np.flatnonzero(tails.written[index]) for index in own.ends}
        segment = Segment()
        for index, columns in written.items():
            segment.append(index, len(columns))
            own.ends[index] += len(columns)
        at = [index * tails.written.shape[1] + columns for index, columns in written.items()]
        if segment.used == 0:
            return
        chosen = mx.array(np.concatenate(at).astype(np.int32))
        self._add(
            own,
            segment,
            lambda cache: [_columns([_side_by_side(side) for side in tails.kv[cache]], chosen)],
        )

    def _add(self, own: WindowClass, segment: Segment, take: Callable[[int], Sequence[KV]]) -> None:
        """A new segment. `take`: of a cache, what it holds in order, [1, heads, tokens, dim] each,
        which nothing else holds then. Each row has a share of memory for moves; a row that is
        longer than these allow for is copied one layer after the other."""
        segment.capacity = self._capacity(segment.used)
        nbytes = self._spare.footprint.bytes_by_window[own.window]
        allowed = int(MOVING_SHARE * (own.num_held + segment.used) * nbytes)
        paced = PacedLaunch(segment.capacity * nbytes, allowed)
        for cache in own.caches:
            sides = zip(*take(cache), strict=True)
            self._kv[cache].append([_packed(list(side), segment.capacity) for side in sides])
            del sides
            paced.launch(self._kv[cache][-1])
        own.segments.append(segment)
        own.forget_passed()
        self._drop_empty(own)
        if (found := own.to_merge()) is not None:
            self._merge(own, *found)

    def _drop_empty(self, own: WindowClass) -> None:
        kept = [n for n, segment in enumerate(own.segments) if segment.num_held]
        for cache in own.caches if len(kept) < len(own.segments) else ():
            self._kv[cache] = [self._kv[cache][n] for n in kept]
        own.segments = [own.segments[n] for n in kept]

    def _merge(self, own: WindowClass, first: int, last: int) -> None:
        """One layer after the other: old arrays are released when their successors are launched."""
        segment, columns = own.merged(first, last)
        segment.capacity = self._capacity(segment.used)
        if segment.used < segment.capacity:  # spare columns hold nothing of rows that left
            columns = np.pad(columns, (0, segment.capacity - segment.used), mode="edge")
        chosen = mx.array(columns.astype(np.int32))
        nbytes = sum(self._layout.caches[cache].nbytes for cache in own.caches)
        paced = PacedLaunch(segment.capacity * nbytes)
        for cache in own.caches:
            parts = self._kv[cache]
            merged: list[mx.array] = []
            for side in (0, 1):
                sources = [pair.pop(0) for pair in parts[first:last]]
                merged.append(mx.contiguous(mx.take(mx.concatenate(sources, 1), chosen, axis=1)))
                del sources  # nothing but the move holds them now
                paced.launch([merged[side]])
            parts[first:last] = [merged]
        own.segments[first:last] = [segment]

    def _capacity(self, num_columns: int) -> int:
        """By the ladder; barely enough where memory allows no more."""
        wanted = max(at_least(num_columns), FEWEST_COLUMNS)
        if wanted - num_columns <= self._spare.max_padding:
            return wanted
        return -(-num_columns // 64) * 64


def _packed(parts: list[mx.array], capacity: int) -> mx.array:
    """[1, heads, tokens, dim] each -> [heads, capacity, dim]"""
    _, heads, _, dim = parts[0].shape
    spare = capacity - sum(part.shape[2] for part in parts)
    zeros = mx.zeros((heads, spare, dim), parts[0].dtype)
    # (`part[0]` would be a copy.)
    return mx.contiguous(mx.concatenate([*(part.squeeze(0) for part in parts), zeros], axis=1))


def _columns(sides: Sequence[mx.array], chosen: mx.array) -> KV:
    keys, values = (mx.take(side, chosen, axis=1)[None] for side in sides)
    return keys, values


def _side_by_side(tail: mx.array) -> mx.array:
    """[width, heads, TAIL, dim] -> [heads, width * TAIL, dim]"""
    _, heads, _, dim = tail.shape
    return tail.swapaxes(0, 1).reshape(heads, -1, dim)


def _seen(visible: np.ndarray, own: WindowClass, positions: np.ndarray) -> np.ndarray:
    """Of the tail columns that a row has, those within the window: the newest ones."""
    if own.window is None or (own.window >= visible.shape[1] and not own.chunked):
        return visible
    age = np.cumsum(visible[:, ::-1], axis=1)[:, ::-1]
    return np.asarray(visible & (age <= own.num_seen(positions)[:, None]))
