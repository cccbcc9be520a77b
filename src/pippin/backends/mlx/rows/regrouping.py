"""Builds new cohorts of what rows hold in old ones and in tails. Knows no steps and no slots.

An old array is released when its successor is launched. mlx allocates an array when an operation is
launched, long before it runs, so where much is moved the host waits for the device now and then:
rows are not in memory twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.layout import LayerCache, Layout
from pippin.backends.mlx.rows.cohorts import Cohort, num_columns
from pippin.backends.mlx.rows.grouping import Group
from pippin.backends.mlx.rows.mains import Tails
from pippin.backends.mlx.rows.pieces import (
    TAIL_SOURCE,
    Blueprint,
    Piece,
    Source,
    Sources,
    columns_of,
)

SMALL_MOVE_BYTES = 32 << 20  # up to this nothing is waited for
SMALL_TABLE_BYTES = 4 << 20  # likewise, where the step before holds all rows until its end
AHEAD_DIVISOR = 8  # of what is moved, this part may be in flight


@dataclass(frozen=True)
class Held:
    """What rows hold before they are regrouped."""

    cohorts: Sequence[Cohort]
    tails: Tails

    def home(self, row: int) -> tuple[int, int]:
        """The number of the row's cohort, and its line there."""
        return next(
            (n, c.indices.index(row)) for n, c in enumerate(self.cohorts) if row in c.indices
        )

    def length(self, row: int) -> int:
        number, line = self.home(row)
        return self.cohorts[number].lengths[line] + int(self.tails.written[row].sum())

    def pieces(self, row: int, cache: int) -> list[Piece]:
        """All that a row holds of a cache, in token order."""
        number, line = self.home(row)
        cohort = self.cohorts[number]
        found = [Piece(("main", number), line, 0, cohort.stored[line][cache])]
        if num_shared := cohort.num_shared(cache):
            found.insert(0, Piece(("shared", number), 0, 0, num_shared))
        return found + [Piece(TAIL_SOURCE, row, *run) for run in _runs(self.tails.written[row])]

    def to_the_end(self, line: list[Piece], cache: int, columns: int) -> list[Piece]:
        """A line with the padding of the main that it begins with: lines then begin alike.

        What comes after is pasted over it, and the rest of it are zeros.
        """
        if not line or line[0].source[0] != "main":
            return line
        first, *others = line
        end = self.cohorts[first.source[1]].columns(cache)
        return [replace(first, stop=min(end, first.start + columns)), *others]

    def give_up(self, cache: int) -> Iterator[Sources]:
        """A cache's keys, then its values; nothing here holds them afterwards."""
        mains: dict[Source, list[mx.array]] = {}
        for number, cohort in enumerate(self.cohorts):
            mains["main", number], shared = cohort.give_up(cache)
            if shared:
                mains["shared", number] = shared
        sides = deque({source: pair[side] for source, pair in mains.items()} for side in (0, 1))
        mains.clear()
        for tail in self.tails.kv[cache]:
            yield {**sides.popleft(), TAIL_SOURCE: tail}


@dataclass(frozen=True)
class Move:
    """A new cohort, and how its arrays are built."""

    cohort: Cohort
    own: dict[int | None, Blueprint]  # by window
    shared: Blueprint | None  # of caches without a window

    def build(self, index: int, cache: LayerCache, side: int, sources: Sources) -> list[mx.array]:
        """One side of a cache."""
        made = [self.own[cache.window].build(cache, side, sources)]
        self.cohort.kv.setdefault(index, []).append(made[0])
        if self.shared is not None and cache.window is None:
            made.append(self.shared.build(cache, side, sources))
            self.cohort.shared.setdefault(index, []).append(made[1])
        return made

    def nbytes(self, cache: LayerCache) -> int:
        own = self.own[cache.window]
        return len(own.stored) * own.columns * cache.nbytes


class PacedLaunch:
    """Launches what is built, and waits so that only a part of it is in flight."""

    def __init__(
        self, total_bytes: int, allowed_bytes: int = 0, *, has_table: bool = False
    ) -> None:
        """`allowed_bytes`: that may be in flight in any case."""
        small = SMALL_TABLE_BYTES if has_table else SMALL_MOVE_BYTES
        self._most_bytes = max(total_bytes // AHEAD_DIVISOR, allowed_bytes)
        self._waits = total_bytes > max(small, allowed_bytes)
        self._in_flight: deque[list[mx.array]] = deque()

    def launch(self, arrays: list[mx.array]) -> None:
        if not self._waits:
            return  # it is launched with the step that regroups
        self._in_flight.append(arrays)
        while len(self._in_flight) > 1 and self._bytes_in_flight > self._most_bytes:
            mx.eval(*self._in_flight.popleft())
        mx.async_eval(*arrays)

    @property
    def _bytes_in_flight(self) -> int:
        return sum(array.nbytes for part in self._in_flight for array in part)


def regroup(
    layout: Layout,
    groups: Sequence[Group],
    cohorts: Sequence[Cohort],
    tails: Tails,
    *,
    has_table: bool = False,
) -> list[Cohort]:
    """New cohorts, one per group, each holding what its rows had in main and tail.

    The old ones are empty afterwards.
    """
    if not tails.kv:
        return []
    held = Held(cohorts, tails)
    moves = [_plan(layout, group, held) for group in groups]
    caches = {index: layout.caches[index] for index in tails.kv}
    total_bytes = sum(move.nbytes(cache) for move in moves for cache in caches.values())
    paced = PacedLaunch(total_bytes, has_table=has_table)
    for index, cache in caches.items():
        for side, sources in enumerate(held.give_up(index)):
            paced.launch([a for move in moves for a in move.build(index, cache, side, sources)])
    return [move.cohort for move in moves]


def _plan(layout: Layout, group: Group, held: Held) -> Move:
    """A line that pads the group is taken for as long as its first row, and holds zeros."""
    first = next(row for row in group.indices if row >= 0)
    lengths = [held.length(first if row < 0 else row) for row in group.indices]
    own: dict[int | None, Blueprint] = {}
    shared = None
    for cache in held.tails.kv:
        window = layout.caches[cache].window
        if window not in own:
            own[window] = _own_columns(group, held, cache, window)
        if window is None and group.num_shared and shared is None:
            begin = columns_of(held.pieces(first, cache), 0, group.num_shared)
            shared = Blueprint.of([begin], [group.num_shared], group.num_shared)
    windows = {cache: layout.caches[cache].window for cache in held.tails.kv}
    stored = [
        {cache: own[window].stored[line] for cache, window in windows.items()}
        for line in range(len(lengths))
    ]
    return Move(Cohort(list(group.indices), lengths, stored), own, shared)


def _own_columns(group: Group, held: Held, cache: int, window: int | None) -> Blueprint:
    """All that the lines hold, but for what is shared or has left the window."""
    pieces = {row: held.pieces(row, cache) for row in group.indices if row >= 0}
    totals = {row: sum(p.num_columns for p in found) for row, found in pieces.items()}
    dropped = {
        row: group.num_shared if window is None else max(total - window, 0)
        for row, total in totals.items()
    }
    first = next(iter(pieces))
    stored = [totals[row] - dropped[row] for row in (r if r >= 0 else first for r in group.indices)]
    columns = num_columns(max(stored))
    lines = [
        [] if row < 0 else held.to_the_end(columns_of(pieces[row], dropped[row]), cache, columns)
        for row in group.indices
    ]
    return Blueprint.of(lines, stored, columns)


def _runs(written: np.ndarray) -> list[tuple[int, int]]:
    """Where stretches of True begin and end."""
    edges = np.flatnonzero(np.diff(np.pad(written.astype(np.int8), 1)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
