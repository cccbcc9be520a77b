"""Mains packed: the columns of all rows one after the other, in one array per layer and side.

    [ row 0's columns | row 3's columns | left by row 2 | row 1's columns | spare ]

Nothing is padded, rows of all lengths cost what they hold, and a step has few shapes: how many rows
and how many columns in all, the latter by a ladder. For devices where a kernel attends to it
(gpu/packed_attention.py): launching is expensive there and copying is cheap, so a row that joins is
copied in at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.attention.decode_step import Tree
from pippin.backends.mlx.attention.packed_kv import PackedShape
from pippin.backends.mlx.attention.paths import AttentionPaths
from pippin.backends.mlx.layout import LayerCache, Layout
from pippin.backends.mlx.payloads.packing import KV
from pippin.backends.mlx.rows.footprint import SpareLimit
from pippin.backends.mlx.rows.mains import Row, Tails
from pippin.backends.mlx.rows.regrouping import PacedLaunch
from pippin.backends.mlx.shapes import at_least

FEWEST_COLUMNS = 512


@dataclass
class Place:
    """A row's columns in the arrays of one window class."""

    start: int
    num_columns: int
    end: int  # the position after its last column


@dataclass
class WindowClass:
    """Where each row's columns are, in the caches of one window."""

    window: int | None
    caches: Sequence[int] = ()
    capacity: int = 0
    used: int = 0
    places: dict[int, Place] = field(default_factory=dict)  # by row index

    @property
    def num_held(self) -> int:
        return sum(place.num_columns for place in self.places.values())

    @property
    def longest(self) -> int:
        return max((place.num_columns for place in self.places.values()), default=0)

    def append(self, index: int, num_columns: int, end: int) -> Place:
        place = self.places[index] = Place(self.used, num_columns, end)
        self.used += num_columns
        return place

    def table(self, positions: np.ndarray) -> np.ndarray:
        """int32 [width, 2]: where each row's visible columns begin, and how many there are."""
        table = np.zeros((len(positions), 2), dtype=np.int32)
        for index, place in self.places.items():
            hidden = 0
            if self.window is not None:
                first_position = place.end - place.num_columns
                hidden = max(int(positions[index]) - self.window + 1 - first_position, 0)
            hidden = min(hidden, place.num_columns)
            table[index] = place.start + hidden, place.num_columns - hidden
        return table


class PackedMains:
    num_groups = 1

    def __init__(self, layout: Layout, spare: SpareLimit, paths: AttentionPaths) -> None:
        self._layout = layout
        self._spare = spare
        self._paths = paths
        self._classes = [
            WindowClass(w, [i for i in layout.kv_indices if layout.caches[i].window == w])
            for w in layout.window_classes
        ]
        self._kv: dict[int, list[mx.array]] = {}  # by cache: [heads, capacity, dim], both sides

    def join(self, joining: Sequence[tuple[Row, Mapping[int, KV]]]) -> None:
        for own in self._classes:
            sizes = [kv[own.caches[0]][0].shape[2] for _, kv in joining]
            if own.used + sum(sizes) > own.capacity:
                self._repack(own, room=sum(sizes))
            for (row, kv), size in zip(joining, sizes, strict=True):
                place = own.append(row.index, size, row.length)
                for cache in own.caches:
                    for side, new in enumerate(kv[cache]):
                        self._kv[cache][side][:, place.start : place.start + size] = new[0]

    def leave(self, row: Row) -> None:
        for own in self._classes:
            own.places.pop(row.index, None)

    def pieces_of(self, row: Row, cache: int) -> list[KV]:
        place = next(own for own in self._classes if cache in own.caches).places[row.index]
        columns = slice(place.start, place.start + place.num_columns)
        keys, values = self._kv[cache]
        return [(keys[None, :, columns], values[None, :, columns])]

    def view(self, positions: np.ndarray, visible: np.ndarray) -> tuple[PackedShape, Tree]:
        shape = PackedShape(
            tuple(own.capacity for own in self._classes),
            tuple(at_least(own.longest) for own in self._classes),
            self._paths,
        )
        tree = {
            "places": [mx.array(own.table(positions)) for own in self._classes],
            "visible": [mx.array(_last(visible, own.window)) for own in self._classes],
            "mains": [list(self._kv[cache]) for cache in self._layout.kv_indices],
        }
        return shape, tree

    def want_moving(self, rows: Sequence[Row], width: int, steps_unchanged: int) -> bool:
        spare_bytes = sum(
            (own.capacity - own.num_held) * self._spare.footprint.bytes_by_window[own.window]
            for own in self._classes
        )
        return steps_unchanged <= 1 and self._spare.is_exceeded(spare_bytes, width - len(rows))

    def absorb(self, rows: Sequence[Row], tails: Tails) -> None:
        for own in self._classes:
            self._repack(own, tails=tails)

    def renumber(self, new: Mapping[int, int]) -> None:
        for own in self._classes:
            own.places = {new[index]: place for index, place in own.places.items()}

    def arrays(self) -> list[mx.array]:
        return [side for sides in self._kv.values() for side in sides]

    # ---- inside ----------------------------------------------------------------------------

    def _repack(self, own: WindowClass, *, room: int = 0, tails: Tails | None = None) -> None:
        """All rows one after the other again, each with its part of `tails`; then `room`."""
        columns: list[np.ndarray] = []  # of the arrays, then of all lines of the tails
        new = WindowClass(own.window)
        for index, place in own.places.items():
            kept = np.arange(place.start, place.start + place.num_columns)
            if tails is not None:
                written = np.flatnonzero(tails.written[index])
                tail_len = tails.written.shape[1]
                kept = np.concatenate([kept, own.capacity + index * tail_len + written])
                place.end += len(written)
            if own.window is not None:
                kept = kept[-own.window :]
            new.append(index, len(kept), place.end)
            columns.append(kept)
        new.capacity = self._capacity(new.used + room)
        chosen = np.zeros(new.capacity, dtype=np.int32)
        if columns:  # spare columns hold nothing of rows that left
            kept = np.concatenate(columns)
            chosen[: new.used], chosen[new.used :] = kept, kept[-1]
        self._move(own, new.capacity, mx.array(chosen), tails)
        own.capacity, own.used, own.places = new.capacity, new.used, new.places

    def _capacity(self, num_columns: int) -> int:
        """By the ladder; barely enough where memory allows no more."""
        wanted = max(at_least(num_columns), FEWEST_COLUMNS)
        if wanted - num_columns <= self._spare.max_padding:
            return wanted
        return -(-num_columns // 64) * 64

    def _move(self, own: WindowClass, capacity: int, chosen: mx.array, tails: Tails | None) -> None:
        caches = {index: self._layout.caches[index] for index in own.caches}
        paced = PacedLaunch(sum(capacity * cache.nbytes for cache in caches.values()))
        for index, cache in caches.items():
            old = self._kv.pop(index, [])
            made = []
            for side in (0, 1):
                sources = [old.pop(0)] if old else []  # nothing but the move holds it now
                if tails is not None:
                    sources.append(_side_by_side(tails.kv[index][side]))
                made.append(_gathered(sources, chosen, cache, side))
                paced.launch([made[-1]])
            self._kv[index] = made


def _gathered(sources: list[mx.array], chosen: mx.array, cache: LayerCache, side: int) -> mx.array:
    if not sources or sources[0].shape[1] == 0:
        heads, dim = cache.shapes[side]
        return mx.zeros((heads, chosen.shape[0], dim), cache.dtypes[side])
    source = sources[0] if len(sources) == 1 else mx.concatenate(sources, axis=1)
    return mx.contiguous(mx.take(source, chosen, axis=1))


def _side_by_side(tail: mx.array) -> mx.array:
    """[width, heads, TAIL, dim] -> [heads, width * TAIL, dim]"""
    _, heads, _, dim = tail.shape
    return tail.swapaxes(0, 1).reshape(heads, -1, dim)


def _last(visible: np.ndarray, window: int | None) -> np.ndarray:
    """Of the tail columns that a row has, those within the window: the newest ones."""
    if window is None or window >= visible.shape[1]:
        return visible
    age = np.cumsum(visible[:, ::-1], axis=1)[:, ::-1]
    return np.asarray(visible & (age <= window))
