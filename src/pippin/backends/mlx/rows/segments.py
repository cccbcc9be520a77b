"""Where the columns of rows lie: in a few segments, the oldest first.

    segment 0   [ row 0's columns | row 3's columns | left by row 2 | spare ]
    segment 1   [ row 0's columns | row 1's columns | spare ]
    segment 2   [ row 5's columns | row 0's columns | spare ]

A row's columns in order are those of segment 0, of 1, of 2. Rows that join are a new segment, and
so are full tails: nothing else is copied. When there are more than may be, the two neighbours that
hold the least are merged. Rows that begin with the same tokens may name the same columns.

An operation on CPUs finds them by one small array, the KV table (cpu/cpp): a step's
graph is then the same whichever the rows are and however long. Columns that several rows name are
read for all of them at once, where that saves enough:

    row 0   [ 0 ............ 900 | own ]        together: rows 0 and 1 at [0, 900),
    row 1   [ 0 ............ 900 | own ]        each its own columns by itself
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.cpu.operations import operations
from pippin.backends.mlx.layout import Layout


@dataclass(eq=False)
class Segment:
    capacity: int  # columns
    kv: dict[int, list[mx.array]] = field(default_factory=dict)  # by cache: [heads, capacity, dim]


class Piece(NamedTuple):
    """A row's columns that lie side by side."""

    segment: Segment
    start: int
    num_columns: int


@dataclass
class WindowClass:
    """The segments of the caches that have one window."""

    window: int | None
    caches: Sequence[int] = ()
    chunked: bool = False  # the window does not slide: it begins at a multiple of its size
    segments: list[Segment] = field(default_factory=list)
    pieces: dict[int, list[Piece]] = field(default_factory=dict)  # by row index, in token order

    @property
    def capacity(self) -> int:
        return sum(segment.capacity for segment in self.segments)

    @property
    def longest(self) -> int:
        return max(map(self.num_columns, self.pieces), default=0)

    def num_columns(self, index: int) -> int:
        return sum(piece.num_columns for piece in self.pieces[index])

    def held(self) -> list[int]:
        """Of each segment, how many columns are some row's."""
        spans: dict[int, list[tuple[int, int]]] = {id(segment): [] for segment in self.segments}
        for segment, start, count in (piece for own in self.pieces.values() for piece in own):
            spans[id(segment)].append((start, start + count))
        return [_covered(spans[id(segment)]) for segment in self.segments]

    def append(self, segment: Segment, counts: Mapping[int, int]) -> None:
        """The last columns of these rows, one row after the other."""
        self.segments.append(segment)
        start = 0
        for index, count in counts.items():
            own = self.pieces.setdefault(index, [])
            own += [Piece(segment, start, count)] if count else []
            start += count

    def first_columns(self, index: int, num_columns: int) -> list[Piece]:
        """Pieces of a row up to there."""
        found: list[Piece] = []
        for piece in self.pieces[index]:
            count = min(piece.num_columns, num_columns)
            num_columns -= count
            if count:
                found.append(piece._replace(num_columns=count))
        return found

    def begin_alike(self, index: int, other: int, num_columns: int) -> None:
        """A row names so many columns of another one in place of its own first ones."""
        rest = _behind(self.pieces[index], num_columns)
        self.pieces[index] = [*self.first_columns(other, num_columns), *rest]

    def leave(self, index: int) -> None:
        self.pieces.pop(index, None)

    def renumber(self, new: Mapping[int, int]) -> None:
        self.pieces = {new[index]: pieces for index, pieces in self.pieces.items()}

    def forget_passed(self) -> None:
        """Columns that every later token's window has passed belong to no row; nor do segments of
        no row's columns stay."""
        for index, pieces in self.pieces.items():
            passed = 0 if self.window is None else self.num_columns(index) - self.window
            self.pieces[index] = _behind(pieces, max(passed, 0))
        self.segments = [part for part, n in zip(self.segments, self.held(), strict=True) if n]

    def table(self, most_segments: int, num_hidden: np.ndarray) -> np.ndarray:
        """int32 [width, most_segments, 2]: where a row's columns begin in each segment, and how
        many there are, but for so many of the first, int32 [width]."""
        table = np.zeros((len(num_hidden), most_segments, 2), dtype=np.int32)
        numbers = {id(segment): number for number, segment in enumerate(self.segments)}
        for index, pieces in self.pieces.items():
            hidden = int(num_hidden[index])
            for segment, start, count in pieces:
                here = min(hidden, count)
                hidden -= here
                table[index, numbers[id(segment)]] = start + here, count - here
        return table

    def num_hidden(self, positions: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """int32 [width]: the first columns that a row's token there does not see. `ends`: the
        position after a row's last column."""
        oldest_seen, hidden = positions + 1 - self.num_seen(positions), np.zeros_like(positions)
        for index in self.pieces:
            first = ends[index] - self.num_columns(index)
            hidden[index] = max(oldest_seen[index] - first, 0)
        return hidden

    def num_seen(self, positions: np.ndarray) -> np.ndarray:
        """How many tokens the window has at each of these positions, their own included."""
        if self.window is None:
            return positions + 1
        return positions % self.window + 1 if self.chunked else np.full_like(positions, self.window)

    def to_merge(self, most_segments: int) -> tuple[int, int] | None:
        """From which segment up to which, where there are more than that."""
        if len(self.segments) <= most_segments:
            return None
        held = self.held()
        first = min(range(len(held) - 1), key=lambda n: (held[n] + held[n + 1], -n))
        return first, first + 2

    def merge(self, first: int, last: int) -> tuple[Segment, np.ndarray]:
        """Segments `first` to `last` become one, without room: it, and where each of its columns
        was, counted through them, spare columns included."""
        merging = self.segments[first:last]
        ends = np.cumsum([0, *(segment.capacity for segment in merging)])
        offsets = {id(segment): end for segment, end in zip(merging, ends, strict=False)}
        earlier = set(map(id, self.segments[:first]))
        place = np.full(ends[-1], -1, np.int32)  # of each of their columns in the new one
        new, columns = Segment(0), [np.zeros(0, np.int32)]
        for index, pieces in self.pieces.items():
            own = [
                np.arange(start, start + count, dtype=np.int32) + offsets[id(segment)]
                for segment, start, count in pieces
                if id(segment) in offsets
            ]
            if not own:
                continue
            at = np.concatenate(own)
            columns.append(at[place[at] < 0])  # the others are of a row that begins alike
            place[columns[-1]] = new.capacity + np.arange(len(columns[-1]))
            new.capacity += len(columns[-1])
            cuts = np.flatnonzero(np.diff(place[at]) != 1) + 1
            moved = [Piece(new, int(run[0]), len(run)) for run in np.split(place[at], cuts)]
            rest = [piece for piece in pieces if id(piece.segment) not in offsets]
            num_before = sum(id(piece.segment) in earlier for piece in rest)
            self.pieces[index] = [*rest[:num_before], *moved, *rest[num_before:]]
        self.segments[first:last] = [new]
        return new, np.concatenate(columns)


def _behind(pieces: Sequence[Piece], num_columns: int) -> list[Piece]:
    """All but so many of the first columns."""
    rest: list[Piece] = []
    for segment, start, count in pieces:
        hidden = min(num_columns, count)
        num_columns -= hidden
        if hidden < count:
            rest.append(Piece(segment, start + hidden, count - hidden))
    return rest


def _covered(spans: list[tuple[int, int]]) -> int:
    """How many numbers are in one of these at least."""
    covered = reached = 0
    for start, end in sorted(spans):
        covered += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return covered


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
