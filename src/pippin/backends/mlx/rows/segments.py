"""Where the columns of packed rows lie: in a few segments, the oldest first. Knows no arrays.

    segment 0   [ row 0's columns | row 3's columns | left by row 2 | spare ]
    segment 1   [ row 0's columns | row 1's columns | spare ]
    segment 2   [ row 5's columns | row 0's columns | spare ]

A row's columns in order are those of segment 0, of 1, of 2. Rows that join are a new segment, and
so are full tails: nothing else is copied. A kernel reads `MOST_SEGMENTS` of them. When there are
more, the two neighbours that hold the least are merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pippin.backends.mlx.attention.paths import MOST_SEGMENTS


class Piece(NamedTuple):
    """A row's columns in one segment."""

    start: int
    num_columns: int


@dataclass
class Segment:
    capacity: int = 0
    used: int = 0
    pieces: dict[int, Piece] = field(default_factory=dict)  # by row index

    @property
    def num_held(self) -> int:
        return sum(piece.num_columns for piece in self.pieces.values())

    def append(self, index: int, num_columns: int) -> None:
        if num_columns:
            self.pieces[index] = Piece(self.used, num_columns)
        self.used += num_columns


@dataclass
class WindowClass:
    """The segments of the caches that have one window."""

    window: int | None
    caches: Sequence[int] = ()
    chunked: bool = False  # the window does not slide: it begins at a multiple of its size
    segments: list[Segment] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)  # by row: the position after its last column

    @property
    def capacity(self) -> int:
        return sum(segment.capacity for segment in self.segments)

    @property
    def num_held(self) -> int:
        return sum(segment.num_held for segment in self.segments)

    @property
    def longest(self) -> int:
        return max(map(self.num_columns, self.ends), default=0)

    def num_columns(self, index: int) -> int:
        return sum(piece.num_columns for _, piece in self.pieces_of(index))

    def pieces_of(self, index: int) -> list[tuple[int, Piece]]:
        """In token order, each with the number of its segment."""
        numbered = enumerate(self.segments)
        return [(n, part.pieces[index]) for n, part in numbered if index in part.pieces]

    def leave(self, index: int) -> None:
        self.ends.pop(index, None)
        for segment in self.segments:
            segment.pieces.pop(index, None)

    def renumber(self, new: Mapping[int, int]) -> None:
        self.ends = {new[index]: end for index, end in self.ends.items()}
        for segment in self.segments:
            segment.pieces = {new[index]: piece for index, piece in segment.pieces.items()}

    def forget_passed(self) -> None:
        """Columns that every later token's window has passed belong to no row."""
        if self.window is None:
            return
        for index in self.ends:
            passed = self.num_columns(index) - self.window
            for number, (start, count) in self.pieces_of(index):
                hidden = min(max(passed, 0), count)
                passed -= hidden
                pieces = self.segments[number].pieces
                pieces[index] = Piece(start + hidden, count - hidden)
                if hidden == count:
                    del pieces[index]

    def table(self, positions: np.ndarray) -> np.ndarray:
        """int32 [width, MOST_SEGMENTS, 2]: where a row's visible columns begin in each segment,
        and how many there are."""
        table = np.zeros((len(positions), MOST_SEGMENTS, 2), dtype=np.int32)
        for index, end in self.ends.items():
            hidden = 0
            if self.window is not None:
                first_position = end - self.num_columns(index)
                num_seen = int(self.num_seen(positions[index : index + 1])[0])
                hidden = max(int(positions[index]) + 1 - num_seen - first_position, 0)
            for number, (start, count) in self.pieces_of(index):
                here = min(hidden, count)
                hidden -= here
                table[index, number] = start + here, count - here
        return table

    def num_seen(self, positions: np.ndarray) -> np.ndarray:
        """How many tokens the window has at each of these positions, their own included."""
        assert self.window is not None
        if self.chunked:
            return np.asarray(positions % self.window + 1)
        return np.full(len(positions), self.window)

    def to_merge(self) -> tuple[int, int] | None:
        """From which segment up to which, where a kernel could not read them all."""
        if len(self.segments) <= MOST_SEGMENTS:
            return None
        held = [segment.num_held for segment in self.segments]
        first = min(range(len(held) - 1), key=lambda n: (held[n] + held[n + 1], -n))
        return first, first + 2

    def merged(self, first: int, last: int) -> tuple[Segment, np.ndarray]:
        """What segments `first` to `last` hold as one, without room, and where each of its columns
        was: counted through these segments, spare columns included."""
        merging = self.segments[first:last]
        offsets = np.cumsum([0, *(segment.capacity for segment in merging)])
        new, columns = Segment(), [np.zeros(0, np.int32)]
        for index in self.ends:
            own = [
                np.arange(piece.start, piece.start + piece.num_columns) + offset
                for segment, offset in zip(merging, offsets, strict=False)
                if (piece := segment.pieces.get(index)) is not None
            ]
            new.append(index, sum(map(len, own)))
            columns += own
        return new, np.concatenate(columns)
