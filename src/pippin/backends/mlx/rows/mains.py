"""What decode rows hold apart from their tails. Knows no steps and no slots.

A row's *main* is never written: with two steps in flight something always reads it. The columns of
all rows lie one after the other, in a few segments per layer and side (segments.py). A row that
joins is copied once at the most, and no other row is.

A kernel reads segments as they are (gpu/packed_attention.py), and so does an operation of ours on
CPUs, which is given a table of where rows' columns lie (segments.py): there what rows begin with in
common is held, and read, once. Plain operations gather each row's columns in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.attention.decode_step import PackedShape, Tree
from pippin.backends.mlx.attention.packed_rows import MOST_SEGMENTS, AttentionPaths, columns_at
from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.payloads.packing import KV
from pippin.backends.mlx.rows import arrays
from pippin.backends.mlx.rows.memory import COLUMN_STEP, MOVING_SHARE, PacedLaunch, SpareLimit
from pippin.backends.mlx.rows.segments import Segment, WindowClass, common_len, make_kv_table
from pippin.backends.mlx.shapes import at_least

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
            age = (positions - ends)[:, None] - np.arange(arrays.TAIL)
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
        at = [index * arrays.TAIL + np.arange(count) for index, count in counts.items()]
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
