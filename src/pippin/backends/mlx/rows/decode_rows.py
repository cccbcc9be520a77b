"""The decode rows: what running requests hold, arranged so that nothing large is ever written.

    one row's keys:   [ main: immutable | tail: 64 columns, one written each step ]

MLX updates in place only when nothing else holds a buffer, and with two steps in flight something
always does: writing KV in place would copy all of it, every step. So *main* (mains.py) is never
written. Only the *tail* is, one column of each row, where the row itself ends. When a row's tail is
full, all tails move into new mains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.attention.decode_step import StepShape, Tree
from pippin.backends.mlx.attention.packed_rows import AttentionPaths
from pippin.backends.mlx.attention.views import reads_table
from pippin.backends.mlx.layout import LayerCache, Layout
from pippin.backends.mlx.payloads.packing import KV
from pippin.backends.mlx.prefill.batch import PromptState
from pippin.backends.mlx.recurrent.replay import kept_shapes
from pippin.backends.mlx.rows import memory
from pippin.backends.mlx.rows.decode_forward import StepResult
from pippin.backends.mlx.rows.mains import Mains, Row
from pippin.backends.mlx.rows.memory import Footprint, SpareLimit


@dataclass
class RowArrays:
    """What decode rows have beside their mains: tails and recurrent states, arrays with a line per
    row. Lines that no row has are computed along and mean nothing."""

    layout: Layout
    max_depth: int = 0  # of drafts, of which states keep inputs behind their own entries
    width: int = 0
    tails: dict[int, list[mx.array]] = field(default_factory=dict)  # by cache, see `_blanks`
    states: dict[int, list[mx.array]] = field(default_factory=dict)

    def arrays(self) -> list[mx.array]:
        caches = (*self.tails.values(), *self.states.values())
        return [array for entries in caches for array in entries]

    def take_over(self, tails: Sequence[KV], states: Sequence[list[mx.array]]) -> None:
        """What a step made of them, in the layout's order."""
        self.tails = dict(zip(self.layout.kv_indices, map(list, tails), strict=True))
        self.states = dict(zip(self.layout.state_indices, states, strict=True))

    def tail_of(self, cache: int, line: int, num_columns: int) -> KV:
        keys, values = (side[line : line + 1, :, :num_columns] for side in self.tails[cache])
        return keys, values

    def states_of(self, line: int) -> dict[int, list[mx.array]]:
        """In buffers of their own: a view would keep every line's alive."""
        return {
            cache: [mx.contiguous(entry[line : line + 1]) for entry in entries]
            for cache, entries in self.states.items()
        }

    def clear(self, lines: Sequence[int]) -> None:
        """For new rows. A masked column has weight 0, but 0 times inf is NaN: what the last row
        left in a tail must be cleared; in memory of its own while that is still to be captured."""
        is_new = mx.array(np.isin(np.arange(self.width), lines))[:, None, None, None]
        for cache, sides in self.tails.items():
            self.tails[cache] = [mx.where(is_new, 0, side) for side in sides]

    def begin_tails(self) -> None:
        """Empty, in memory of their own: the move of the old ones may not have read them yet, and
        on CPUs a column is written in place."""
        for index in self.tails:
            self.tails[index] = self._blanks(self.layout.caches[index], self.width)

    def put_states(self, line: int, states: dict[int, list[mx.array]]) -> None:
        for cache, entries in states.items():
            for number, entry in enumerate(entries):
                if self.width == 1:
                    self.states[cache][number] = entry
                else:
                    self.states[cache][number][line : line + 1] = entry

    def widen(self, width: int) -> None:
        """New lines are zeros."""
        extra = width - self.width
        for index, cache in enumerate(self.layout.caches):
            held = self.states if cache.is_state else self.tails
            blanks = self._blanks(cache, extra)
            old = zip(held[index], blanks, strict=True) if index in held else None
            held[index] = blanks if old is None else [mx.concatenate(list(pair)) for pair in old]
        self.width = width

    def choose(self, lines: Sequence[int]) -> None:
        """Keep only these lines, in this order."""
        at = mx.array(np.array(lines, dtype=np.int32))
        for held in (self.tails, self.states):
            for cache, entries in held.items():
                held[cache] = [mx.take(entry, at, axis=0) for entry in entries]
        self.width = len(lines)

    def _blanks(self, cache: LayerCache, num_lines: int) -> list[mx.array]:
        """A state's entries [lines, ...], or a tail's keys and values [lines, heads, TAIL, dim]."""
        shapes: list[tuple[int, ...]] = list(cache.shapes)
        if not cache.is_state:
            shapes = [(heads, memory.TAIL, dim) for heads, dim in cache.shapes]
        found = [
            mx.zeros((num_lines, *shape), dtype)
            for shape, dtype in zip(shapes, cache.dtypes, strict=True)
        ]
        kept = kept_shapes(cache, self.max_depth) if cache.is_state else []
        return found + [mx.zeros((num_lines, *shape), cache.dtypes[0]) for shape in kept]


class DecodeRows:
    """`paths`: how its steps may attend, and so how mains lie."""

    def __init__(
        self, layout: Layout, paths: AttentionPaths | None = None, max_depth: int = 0
    ) -> None:
        self.layout = layout
        self._max_depth = max_depth  # of drafts (drafts/draft_rows.py)
        self.spare = SpareLimit(Footprint(layout, max_depth))
        self.rows: dict[int, Row] = {}  # by slot
        self._paths = paths or AttentionPaths()
        self._steps_unchanged = 0
        self._reset()

    def _reset(self) -> None:
        has_table = self._paths.kernel is None and reads_table(self.layout)
        self.mains = Mains(self.layout, self.spare, self._paths, has_table=has_table)
        self._per_row = RowArrays(self.layout, self._max_depth)

    @property
    def width(self) -> int:
        return self._per_row.width

    @property
    def states(self) -> dict[int, list[mx.array]]:
        """By cache: [width, ...]"""
        return self._per_row.states

    # ---- joining and leaving ---------------------------------------------------------------

    def join(
        self,
        joining: Sequence[tuple[int, PromptState]],
        prompts: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        """Finished prompts become rows; `prompts`: their tokens by slot, to share."""
        if not joining:
            return
        self._steps_unchanged = 0
        width = self.spare.width_for(len(self.rows) + len(joining))
        if width > self.width:
            self._per_row.widen(width)
        taken = {row.index for row in self.rows.values()}
        free = [index for index in range(self.width) if index not in taken][: len(joining)]
        self._per_row.clear(free)
        joined = []
        for (slot, prompt), index in zip(joining, free, strict=True):
            tokens = prompts.get(slot) if prompts and self.layout.splits else None
            self.rows[slot] = Row(slot, index, prompt.length, tokens)
            self._per_row.put_states(index, prompt.states)
            joined.append((self.rows[slot], prompt.kv))
        self.mains.join(joined)

    def leave(self, slot: int) -> None:
        row = self.rows.pop(slot)
        self._steps_unchanged = 0
        self.mains.leave(row)
        if not self.rows:
            self._reset()

    def kv_of(self, slot: int, start: int = 0) -> dict[int, KV]:
        """What a row's attention layers hold of its tokens from `start` on, in token order.

        [1, heads, tokens, dim]: one at least, and fewer where a window has passed them by.
        """
        row = self.rows[slot]
        picked: dict[int, KV] = {}
        for cache in self._per_row.tails:
            pieces = self.mains.pieces_of(row, cache)
            if row.num_tail:
                pieces.append(self._per_row.tail_of(cache, row.index, row.num_tail))
            picked[cache] = _last_columns(pieces, max(row.length - start, 1))
        return picked

    def states_of(self, slot: int) -> dict[int, list[mx.array]]:
        row = self.rows[slot]
        return self._per_row.states_of(row.index) if row.parked is None else row.parked

    # ---- one step --------------------------------------------------------------------------

    def advance(
        self,
        slots: Sequence[int],
        resolve: Callable[[np.ndarray], mx.array],
        forward: Callable[[StepShape, Tree], StepResult],
    ) -> tuple[np.ndarray, mx.array]:
        """Run one token of exactly `slots`; the slot of each row (0: none), and logits [rows, V].

        `resolve`: of rows' slots, their input ids, int32 [rows].
        """
        self._make_room(dict.fromkeys(slots, 1))
        chosen = set(slots)
        slots_by_index, ends = (np.zeros(self.width, dtype=np.int32) for _ in range(2))
        lengths = self._blank_lengths()
        for row in self.rows.values():
            advances = row.slot in chosen
            self._park_or_resume(row, advances=advances)
            lengths[row.index], ends[row.index] = row.length, row.num_main
            if advances:
                slots_by_index[row.index] = row.slot
                row.length += 1
        mains_shape, mains = self.mains.view(lengths, ends)
        tree = {
            "tokens": resolve(slots_by_index)[:, None],
            "offset": mx.array(lengths),
            "cursor": mx.array(lengths - ends),
            "tails": self._tails(),
            "states": [self._per_row.states[cache] for cache in self.layout.state_indices],
            **mains,
        }
        logits, tails, states, _ = forward(StepShape(self.width, mains_shape), tree)
        self._per_row.take_over(tails, states)
        return slots_by_index, logits

    def _make_room(self, num_tokens: Mapping[int, int]) -> None:
        """For so many tokens more of each slot, in its tail."""
        self._steps_unchanged += 1
        self.mains.count_step()
        full = any(self.rows[slot].num_tail + num > memory.TAIL for slot, num in num_tokens.items())
        if full or self.mains.want_moving(self.width - len(self.rows), self._steps_unchanged):
            self.flush()

    def _blank_lengths(self) -> np.ndarray:
        """int32 [width], as long as a tail: a line of no row writes nothing, since the row that had
        it may not have been captured yet."""
        return np.full(self.width, memory.TAIL, dtype=np.int32)

    def _tails(self) -> list[list[mx.array]]:
        return [list(self._per_row.tails[cache]) for cache in self.layout.kv_indices]

    def arrays(self) -> list[mx.array]:
        """Everything a step or a move wrote, for the step's one `mx.async_eval`."""
        return self._per_row.arrays() + self.mains.arrays()

    # ---- inside ----------------------------------------------------------------------------

    def _park_or_resume(self, row: Row, *, advances: bool) -> None:
        """A step computes every row; one that must not advance has its state set aside first."""
        if not self._per_row.states:
            return
        if advances and row.parked is not None:
            parked, row.parked = row.parked, None
            self._per_row.put_states(row.index, parked)
        elif not advances and row.parked is None:
            row.parked = self.states_of(row.slot)

    def flush(self) -> None:
        """Move the tails into new mains; narrow the rows if many left."""
        wanted = self.spare.width_for(len(self.rows))
        if wanted < self.width:
            self._narrow(wanted)
        self.mains.absorb(self._per_row.tails)
        self._per_row.begin_tails()

    def _narrow(self, width: int) -> None:
        """Renumber the remaining rows 0, 1, ... and drop the rest."""
        keep = sorted(self.rows.values(), key=lambda row: row.index)
        order = [row.index for row in keep]
        order += [order[0]] * (width - len(order))
        self._per_row.choose(order)
        self.mains.renumber({row.index: new for new, row in enumerate(keep)})
        for new, row in enumerate(keep):
            row.index = new


def _last_columns(pieces: Sequence[KV], num_columns: int) -> KV:
    """Of pieces that lie side by side, without a copy of the others."""
    wanted: list[KV] = []
    for keys, values in reversed(pieces):
        if num_columns > 0:
            wanted.append((keys[:, :, -num_columns:], values[:, :, -num_columns:]))
        num_columns -= keys.shape[2]
    keys, values = (mx.concatenate(list(side)[::-1], axis=2) for side in zip(*wanted, strict=True))
    return keys, values
