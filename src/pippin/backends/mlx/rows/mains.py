"""What decode rows hold apart from their tails: where the columns of rows lie, and how they move.

A row's *main* is never written: with two steps in flight something always reads it. The columns of
all rows lie one after the other, in a few segments per layer and side, the oldest first:

    segment 0   [ row 0's columns | row 3's columns | left by row 2 | spare ]
    segment 1   [ row 0's columns | row 1's columns | spare ]
    segment 2   [ row 5's columns | row 0's columns | spare ]

A row's columns in order are those of segment 0, of 1, of 2. Rows that join are a new segment, and
so are full tails: nothing else is copied. When there are more than may be, the two neighbours that
hold the least are merged. A kernel reads segments as they are (gpu/packed_attention.py); plain
operations gather each row's columns in every step.

An operation on CPUs finds them by one small array, the KV table (cpu/cpp): a step's graph is then
the same whichever the rows are and however long. What rows begin with in common is held once there,
and read for all of them at once, where that saves enough:

    row 0   [ 0 ............ 900 | own ]        together: rows 0 and 1 at [0, 900),
    row 1   [ 0 ............ 900 | own ]        each its own columns by itself
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.attention.decode_step import PackedShape, Tree
from pippin.backends.mlx.attention.packed_rows import MOST_SEGMENTS, AttentionPaths, columns_at
from pippin.backends.mlx.cpu.operations import operations
from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.payloads.packing import KV
from pippin.backends.mlx.rows import memory
from pippin.backends.mlx.rows.memory import COLUMN_STEP, MOVING_SHARE, PacedLaunch, SpareLimit
from pippin.backends.mlx.shapes import at_least


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


FEWEST_COLUMNS = 256  # of a segment that steps are compiled for
# A segment is padded to this part of all columns at least, where there are so many rows: small ones
# come and go with every join, and each size is another graph. With fewer rows the part is smaller.
LEAST_SHARE, ROWS_OF_LEAST_SHARE = 4, 16
MOST_IN_TABLE = 32  # segments of a window class: copying them costs more than reading many
FEWEST_SHARED = 128  # tokens that a row begins with and another one has
# After it joined: results are known by then, and a row whose numbers are none has left.
SETTLED_STEPS = 8

# Of a row that joins, by cache: [1, heads, tokens, dim].
Joining = tuple["Row", MutableMapping[int, KV]]


@dataclass
class Row:
    """One running request. `length` counts every token it holds, main and tail together."""

    slot: int
    index: int
    length: int
    prompt: np.ndarray | None = None  # int32, where the row may share what others begin with
    num_main: int = 0  # tokens that are not in its tail
    num_steps: int = 0  # since it joined
    parked: dict[int, list[mx.array]] | None = None  # its state, while steps pass it over

    @property
    def num_tail(self) -> int:
        return self.length - self.num_main


class Mains:
    def __init__(
        self,
        layout: Layout,
        spare: SpareLimit,
        paths: AttentionPaths,
        *,
        has_table: bool = False,
    ) -> None:
        """`has_table`: an operation of ours reads the rows by it."""
        self._layout = layout
        self._spare = spare
        self._paths = paths
        self._has_table = has_table
        self._kv_table: mx.array | None = None  # of the rows as they are
        self._rows: list[Row] = []
        self._most_segments = MOST_SEGMENTS if paths.kernel is not None else 1
        if has_table:
            self._most_segments = MOST_IN_TABLE
        self._classes = [
            WindowClass(w, own, chunked=layout.caches[own[0]].chunked)
            for w in layout.window_classes
            if (own := [i for i in layout.kv_indices if layout.caches[i].window == w])
        ]

    def join(self, joining: Sequence[Joining]) -> None:
        """Rows whose prompts are done. What is copied of them is removed from there, so that rows
        are not in memory twice."""
        self._kv_table = None
        for together in [[one] for one in joining] if self._has_table else [joining]:
            for own in self._classes:
                self._join(own, together)
            for row, _ in together:
                row.num_main = row.length
                self._rows.append(row)

    def leave(self, row: Row) -> None:
        self._kv_table = None
        self._rows = [other for other in self._rows if other is not row]
        for own in self._classes:
            own.leave(row.index)
            own.forget_passed()

    def pieces_of(self, row: Row, cache: int) -> list[KV]:
        """What the row has here, in token order: [1, heads, tokens, dim] each."""
        found: list[KV] = []
        for segment, start, count in self._class_of(cache).pieces[row.index]:
            keys, values = (side[None, :, start : start + count] for side in segment.kv[cache])
            found.append((keys, values))
        return found

    def view(self, positions: np.ndarray, ends: np.ndarray) -> tuple[PackedShape | None, Tree]:
        """As a step sees them. int32 [width]: where each row's token stands, and the position after
        the last that is here."""
        if self._has_table:
            if self._kv_table is None:
                self._kv_table = make_kv_table(self._layout, self._classes)
            return None, {"kv_table": self._kv_table}
        shape = PackedShape(
            tuple(tuple(part.capacity for part in own.segments) for own in self._classes),
            tuple(at_least(own.longest) for own in self._classes),
            self._paths,
        )
        mains = [
            [list(segment.kv[cache]) for segment in self._class_of(cache).segments]
            for cache in self._layout.kv_indices
        ]
        if self._paths.kernel is not None:
            places = self._places([own.num_hidden(positions, ends) for own in self._classes])
            age = (positions - ends)[:, None] - np.arange(memory.TAIL)
            seen = [own.num_seen(positions)[:, None] for own in self._classes]
            visible = [mx.array((age >= 0) & (age < num_seen)) for num_seen in seen]
            return shape, {"mains": mains, "places": places, "visible": visible}
        places = self._places([np.zeros_like(ends)] * len(self._classes))
        return shape, {"mains": mains, "places": places, "ends": mx.array(ends)}

    def count_step(self) -> None:
        """Rows that have settled hold what they begin with once, where a table can say so."""
        for row in self._rows if self._has_table else ():
            row.num_steps += 1
            if row.num_steps == SETTLED_STEPS and row.prompt is not None:
                self._share(row, row.prompt)

    def want_moving(self, num_spare_lines: int, steps_unchanged: int) -> bool:
        """Whether too much memory is spare."""
        return steps_unchanged <= 1 and self._spare.is_exceeded(self._spare_bytes, num_spare_lines)

    def absorb(self, tails: Mapping[int, Sequence[mx.array]]) -> None:
        """Move the tails into mains: by cache [width, heads, TAIL, dim]."""
        self._kv_table = None
        merges = self._spare.is_exceeded(self._spare_bytes, 0)
        for own in self._classes:
            self._append_tails(own, tails)
            if merges and own.capacity - sum(own.held()) >= COLUMN_STEP:
                self._merge(own, 0, len(own.segments))
        for row in self._rows:
            row.num_main = row.length

    def renumber(self, new: Mapping[int, int]) -> None:
        """Rows have other indices now."""
        self._kv_table = None
        for own in self._classes:
            own.renumber(new)

    def arrays(self) -> list[mx.array]:
        segments = (segment for own in self._classes for segment in own.segments)
        return [side for part in segments for pair in part.kv.values() for side in pair]

    # ---- inside ----------------------------------------------------------------------------

    def _class_of(self, cache: int) -> WindowClass:
        return next(own for own in self._classes if cache in own.caches)

    def _places(self, num_hidden: Sequence[np.ndarray]) -> list[mx.array]:
        pairs = zip(self._classes, num_hidden, strict=True)
        return [mx.array(own.table(self._most_segments, hidden)) for own, hidden in pairs]

    @property
    def _spare_bytes(self) -> int:
        """Of columns that belong to no row."""
        by_window = self._spare.footprint.bytes_by_window
        spare = ((own.capacity - sum(own.held())) * by_window[own.window] for own in self._classes)
        return sum(spare)

    def _join(self, own: WindowClass, joining: Sequence[Joining]) -> None:
        counts: dict[int, int] = {}
        for row, kv in joining:
            counts[row.index] = kv[own.caches[0]][0].shape[2]
        self._add(
            own, counts, lambda cache: zip(*(kv.pop(cache) for _, kv in joining), strict=True)
        )

    def _share(self, row: Row, prompt: np.ndarray) -> None:
        """Name the columns of the settled row that has most of what this one begins with."""
        num_common, other = max(
            (
                (common_len(prompt, one.prompt), one)
                for one in self._rows
                if one is not row and one.num_steps >= SETTLED_STEPS and one.prompt is not None
            ),
            key=lambda pair: pair[0],
            default=(0, row),
        )
        if num_common < FEWEST_SHARED:
            return
        self._kv_table = None
        for own in self._classes:
            if own.window is None:
                before = {id(piece.segment) for piece in own.pieces[row.index]}
                own.begin_alike(row.index, other.index, num_common)
                own.forget_passed()
                for number, held in enumerate(own.held()):
                    segment = own.segments[number]
                    if id(segment) in before and held < segment.capacity:
                        self._merge(own, number, number + 1)

    def _append_tails(self, own: WindowClass, tails: Mapping[int, Sequence[mx.array]]) -> None:
        counts = {row.index: row.num_tail for row in self._rows}
        if not sum(counts.values()):
            return
        at = [index * memory.TAIL + np.arange(count) for index, count in counts.items()]
        chosen = mx.array(np.concatenate(at).astype(np.int32))

        def take(cache: int) -> list[list[mx.array]]:
            if self._has_table:  # which needs less memory, and more nodes
                rows = counts.items()
                return [[side[i : i + 1, :, :n] for i, n in rows] for side in tails[cache]]
            return [[columns_at([_side_by_side(side)], chosen)[None]] for side in tails[cache]]

        self._add(own, counts, take)

    def _add(
        self,
        own: WindowClass,
        counts: Mapping[int, int],
        take: Callable[[int], Iterable[Sequence[mx.array]]],
    ) -> None:
        """A new segment. `take`: a cache's keys and values in order, [1, heads, tokens, dim] each,
        which nothing else holds then. Each row has a share of memory for moves; a row that is
        longer than these allow for is copied one layer after the other."""
        used = sum(counts.values())
        held = sum(own.held()) + used
        segment = Segment(self._capacity(used, held))
        nbytes = self._spare.footprint.bytes_by_window[own.window]
        allowed = int(MOVING_SHARE * held * nbytes)
        has_table = self._has_table
        copies = len(counts) > 1 or used < segment.capacity  # one row's columns lie as they are
        total = segment.capacity * nbytes if copies else 0
        paced = PacedLaunch(total, 0 if has_table else allowed, has_table=has_table)
        for cache in own.caches:
            segment.kv[cache] = [_packed(side, segment.capacity) for side in take(cache)]
            paced.launch(segment.kv[cache])
        own.append(segment, counts)
        own.forget_passed()
        while (found := own.to_merge(self._most_segments)) is not None:
            self._merge(own, *found)

    def _merge(self, own: WindowClass, first: int, last: int) -> None:
        """One layer after the other: old arrays are released when their successors are launched."""
        old = own.segments[first:last]
        segment, columns = own.merge(first, last)
        used = segment.capacity
        segment.capacity = self._capacity(used, sum(own.held()))
        if used < segment.capacity:  # spare columns hold nothing of rows that left
            columns = np.pad(columns, (0, segment.capacity - used), mode="edge")
        chosen = mx.array(columns.astype(np.int32))
        nbytes = sum(self._layout.caches[cache].nbytes for cache in own.caches)
        has_table = self._has_table
        paced = PacedLaunch(segment.capacity * nbytes, has_table=has_table)
        for cache in own.caches:
            parts = [part.kv.pop(cache) for part in old]
            segment.kv[cache] = []
            for _ in range(2):
                sources = [pair.pop(0) for pair in parts]
                segment.kv[cache].append(mx.contiguous(columns_at(sources, chosen)))
                del sources  # nothing but the move holds them now
                paced.launch(segment.kv[cache][-1:])

    def _capacity(self, num_columns: int, num_held: int) -> int:
        """Of a segment, where rows hold so many columns with it. By the ladder; barely enough where
        memory allows no more, and where shapes are nothing to a step."""
        if self._has_table:
            return num_columns
        wanted = max(at_least(num_columns), FEWEST_COLUMNS)
        if self._most_segments > 1:
            share = LEAST_SHARE * max(ROWS_OF_LEAST_SHARE // max(len(self._rows), 1), 1)
            least = (1 << num_held.bit_length()) // 2 // share  # few sizes: a power of two
            if least - num_columns <= self._spare.max_padding / self._most_segments:
                wanted = max(wanted, least)
        if wanted - num_columns <= self._spare.max_padding:
            return wanted
        return -(-num_columns // COLUMN_STEP) * COLUMN_STEP


def _packed(parts: Sequence[mx.array], capacity: int) -> mx.array:
    """[1, heads, tokens, dim] each -> [heads, capacity, dim]"""
    _, heads, _, dim = parts[0].shape
    spare = capacity - sum(part.shape[2] for part in parts)
    sides = [part.squeeze(0) for part in parts]  # (`part[0]` would be a copy.)
    if spare:
        sides.append(mx.zeros((heads, spare, dim), parts[0].dtype))
    return mx.contiguous(mx.concatenate(sides, axis=1))


def _side_by_side(tail: mx.array) -> mx.array:
    """[width, heads, TAIL, dim] -> [heads, width * TAIL, dim]"""
    _, heads, length, dim = tail.shape
    return tail.swapaxes(0, 1).reshape(heads, len(tail) * length, dim)
