"""The decode rows: what running requests hold, arranged so that nothing large is ever written.

    one row's keys:   [ main: immutable, in a cohort | tail: 64 columns, one written each step ]

MLX updates in place only when nothing else holds a buffer, and with two steps in flight something
always does: writing KV in place would copy all of it, every step. So *main* is never written. Rows
whose mains were built together form a cohort, one array [rows, heads, tokens, dim] per layer. A
request joins as a cohort of its own, without a copy of anybody's KV, and leaves by being forgotten.
Only the *tail* is written: one column for all rows, at a cursor they share. When the cursor reaches
the end, every 64 steps, tails move into new mains, and rows are regrouped by length so that a
step costs what the rows' real lengths cost, not rows x longest. Rows whose prompts begin alike may
then hold that beginning once (cohorts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.prefill.batch import PromptState
from pippin.backends.mlx.rows.arrays import RowArrays
from pippin.backends.mlx.rows.cohorts import Cohort
from pippin.backends.mlx.rows.decode_forward import DecodeForward
from pippin.backends.mlx.rows.footprint import Footprint, SpareLimit
from pippin.backends.mlx.rows.grouping import Group, group_rows
from pippin.backends.mlx.rows.regrouping import regroup
from pippin.backends.mlx.rows.views import StepShape, Tree
from pippin.backends.mlx.tree.packing import KV

SETTLED_STEPS = 8  # in which nobody came or went, before rows are regrouped


@dataclass
class Row:
    """One running request. `length` counts every token it holds, main and tail together."""

    slot: int
    index: int
    length: int
    prompt: np.ndarray | None = None  # int32, where the row may share what others begin with
    parked: dict[int, list[mx.array]] | None = None  # its state, while steps pass it over


@dataclass
class DecodeRows:
    layout: Layout
    cursor: int = 0  # the tail column that the next step writes
    rows: dict[int, Row] = field(default_factory=dict)  # by slot
    cohorts: list[Cohort] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._per_row = RowArrays(self.layout)
        self.spare = SpareLimit(Footprint(self.layout))
        self._steps_unchanged = 0

    def __contains__(self, slot: int) -> bool:
        return slot in self.rows

    @property
    def width(self) -> int:
        return self._per_row.width

    @property
    def states(self) -> dict[int, list[mx.array]]:
        """By leaf: [width, ...]"""
        return self._per_row.states

    # ---- joining and leaving ---------------------------------------------------------------

    def join(
        self,
        joining: Sequence[tuple[int, PromptState]],
        prompts: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        """Take in finished prompts, one cohort each; `prompts`: their tokens by slot, to share."""
        if not joining:
            return
        self._steps_unchanged = 0
        self._widen(self.spare.width_for(len(self.rows) + len(joining)))
        taken = {row.index for row in self.rows.values()}
        free = [index for index in range(self.width) if index not in taken][: len(joining)]
        self._per_row.clear(free)
        for (slot, prompt), index in zip(joining, free, strict=True):
            tokens = prompts.get(slot) if prompts and self.layout.splits else None
            self.rows[slot] = Row(slot, index, prompt.length, tokens)
            self._per_row.put_states(index, prompt.states)
            if prompt.kv:
                stored = {leaf: pair[0].shape[2] for leaf, pair in prompt.kv.items()}
                self.cohorts.append(Cohort.of_one(index, prompt.length, stored, prompt.kv))

    def leave(self, slot: int) -> None:
        row = self.rows.pop(slot)
        self._steps_unchanged = 0
        for cohort in self.cohorts:
            cohort.drop(row.index)
        self.cohorts = [cohort for cohort in self.cohorts if cohort.num_live]
        if not self.rows:
            self._reset()

    def kv_of(self, slot: int, start: int = 0) -> dict[int, KV]:
        """What a row's attention layers hold of its tokens from `start` on, in token order.

        [1, heads, tokens, dim]: one at least, and fewer where a window has passed them by.
        """
        row = self.rows[slot]
        picked: dict[int, KV] = {}
        for leaf in self._per_row.tails:
            homes = [cohort for cohort in self.cohorts if cohort.holds(row.index)]
            pieces = [piece for home in homes for piece in home.pieces_of(row.index, leaf)]
            if self._per_row.written[row.index].any():
                pieces.append(self._per_row.tail_of(leaf, row.index))
            picked[leaf] = _last_columns(pieces, max(row.length - start, 1))
        return picked

    def states_of(self, slot: int) -> dict[int, list[mx.array]]:
        row = self.rows[slot]
        return self._per_row.states_of(row.index) if row.parked is None else row.parked

    # ---- one step --------------------------------------------------------------------------

    def advance(
        self,
        slots: Sequence[int],
        resolve: Callable[[np.ndarray], mx.array],
        forward: DecodeForward,
    ) -> tuple[np.ndarray, mx.array]:
        """Run one token of exactly `slots`; the slot of each row (0: none), and logits [rows, V].

        `resolve` gives the input ids, int32 [rows], of the rows whose slots it is told.
        """
        if self.cursor == self._per_row.tail_len or self._scattered() or self._wasteful():
            self._flush()
        chosen = set(slots)
        slots_by_index = np.zeros(self.width, dtype=np.int32)
        positions = np.zeros(self.width, dtype=np.int32)
        for row in self.rows.values():
            advances = row.slot in chosen
            self._park_or_resume(row, advances=advances)
            if advances:
                slots_by_index[row.index] = row.slot
                positions[row.index] = row.length
                self._per_row.written[row.index, self.cursor] = True
                row.length += 1
        shape, tree = self._step(resolve(slots_by_index), positions)
        logits, tails, states = forward(shape, tree)
        self._per_row.take_over(tails, states)
        self.cursor += 1
        return slots_by_index, logits

    def _step(self, tokens: mx.array, positions: np.ndarray) -> tuple[StepShape, Tree]:
        visible = self._per_row.written.copy()
        visible[:, self.cursor] = True  # also for rows that do not matter: no row sees nothing
        views = [cohort.view(self.layout) for cohort in self.cohorts]
        shape = StepShape(self.width, tuple(view[0] for view in views), self._aligned())
        tree = {
            "tokens": tokens[:, None],
            "offset": mx.array(positions),
            "cursor": mx.array([self.cursor], dtype=mx.int32),
            "written": mx.array(visible),
            "order": self._order(),
            "tails": [list(self._per_row.tails[leaf]) for leaf in self.layout.kv_indices],
            "states": [self._per_row.states[leaf] for leaf in self.layout.state_indices],
            "cohorts": [view[1] for view in views],
        }
        return shape, tree

    def _scattered(self) -> bool:
        """Rows have settled since somebody came or went, and steps would be simpler: regroup early.

        Fewer cohorts would do, or one whose lines are the rows: such steps are compiled.
        """
        self._steps_unchanged += 1
        if self._steps_unchanged != SETTLED_STEPS or self._aligned():
            return False
        num_groups = len(self._groups())
        return num_groups == 1 or num_groups < len(self.cohorts)

    def _wasteful(self) -> bool:
        """Somebody came or went, and now too much is held for nobody."""
        num_spare_lines = self.width - len(self.rows)
        just_changed = self._steps_unchanged <= 1
        return just_changed and self.spare.is_exceeded(self.cohorts, num_spare_lines)

    def _groups(self) -> list[Group]:
        rows = self.rows.values()
        prompts = {row.index: row.prompt for row in rows if row.prompt is not None}
        lengths = {row.index: row.length for row in rows}
        return group_rows(lengths, prompts, self.spare.max_padding)

    def _aligned(self) -> bool:
        if len(self.cohorts) != 1 or len(self.cohorts[0].indices) != self.width:
            return False
        return all(index in (line, -1) for line, index in enumerate(self.cohorts[0].indices))

    def _order(self) -> mx.array:
        indices = [index for cohort in self.cohorts for index in cohort.indices]
        order = np.full(self.width, len(indices), dtype=np.int32)
        for line, index in enumerate(indices):
            if index >= 0:
                order[index] = line
        return mx.array(order)

    def arrays(self) -> list[mx.array]:
        """Everything a step or a regrouping wrote, for the step's one `mx.async_eval`."""
        return self._per_row.arrays() + [array for c in self.cohorts for array in c.arrays()]

    # ---- inside ----------------------------------------------------------------------------

    def _park_or_resume(self, row: Row, *, advances: bool) -> None:
        """A step computes every row; one that must not advance has its state set aside first."""
        if not self.states:
            return
        if advances and row.parked is not None:
            parked, row.parked = row.parked, None
            self._per_row.put_states(row.index, parked)
        elif not advances and row.parked is None:
            row.parked = self.states_of(row.slot)

    def _flush(self) -> None:
        """Move the tails into new mains; regroup rows by length; narrow the rows if many left."""
        wanted = self.spare.width_for(len(self.rows))
        if wanted < self.width:
            self._narrow(wanted)
        groups = self._groups()
        if len(groups) == 1 and self._padding_of_lines() <= self.spare.max_padding:
            # A line for every row: the step gathers nothing.
            held = {row.index for row in self.rows.values()}
            lines = [index if index in held else -1 for index in range(self.width)]
            groups = [replace(groups[0], indices=lines)]
        tails, written = self._per_row.tails, self._per_row.written
        self.cohorts = regroup(self.layout, groups, self.cohorts, tails, written)
        written[:] = False
        self.cursor = 0

    def _padding_of_lines(self) -> int:
        """Tokens, if a cohort of all rows had a line for those that no row has."""
        longest = max(row.length for row in self.rows.values())
        return (self.width - len(self.rows)) * longest

    def _widen(self, width: int) -> None:
        if width > self.width:
            self._per_row.widen(width)

    def _narrow(self, width: int) -> None:
        """Renumber the remaining rows 0, 1, ... and drop the rest."""
        keep = sorted(self.rows.values(), key=lambda row: row.index)
        order = [row.index for row in keep]
        order += [order[0]] * (width - len(order))
        self._per_row.choose(order)
        renumbered = {row.index: new for new, row in enumerate(keep)}
        for cohort in self.cohorts:
            cohort.renumber(renumbered)
        for new, row in enumerate(keep):
            row.index = new

    def _reset(self) -> None:
        self.cursor = 0
        self.cohorts = []
        self._per_row = RowArrays(self.layout)


def _last_columns(pieces: Sequence[KV], num_columns: int) -> KV:
    """Of pieces that lie side by side, without a copy of the others."""
    wanted: list[KV] = []
    for keys, values in reversed(pieces):
        if num_columns > 0:
            wanted.append((keys[:, :, -num_columns:], values[:, :, -num_columns:]))
        num_columns -= keys.shape[2]
    keys, values = (mx.concatenate(list(side)[::-1], axis=2) for side in zip(*wanted, strict=True))
    return keys, values
