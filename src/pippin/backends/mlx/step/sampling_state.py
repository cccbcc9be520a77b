"""The arrays of sampling: parameters of a batch of slots, tokens of a slot. Draws no tokens.

SampleBatch    the parameter arrays of one tuple of slots; built once, used for many steps
TokenHistory   which tokens a penalised slot has read and written, on the device
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx
import numpy as np

from pippin.backends.sampling.rules import FAR, GREEDY_BELOW, Draw, SlotSampling
from pippin.types import SamplingParams


@dataclass(frozen=True)
class RowSubset:
    """Some rows of a batch, or all of them; work on all of them gathers and scatters nothing."""

    rows: tuple[int, ...]
    index: mx.array | None  # int32 [len(rows)]; None: every row, in order

    @classmethod
    def of(cls, rows: Sequence[int], num_rows: int) -> RowSubset:
        index = None if len(rows) == num_rows else mx.array(tuple(rows), dtype=mx.int32)
        return cls(tuple(rows), index)

    def take(self, x: mx.array) -> mx.array:
        return x if self.index is None else x[self.index]

    def replace(self, x: mx.array, f: Callable[[mx.array], mx.array]) -> mx.array:
        """x with f applied to these rows; the caller's array is left as it is."""
        if self.index is None:
            return f(x)
        out = mx.array(x)
        out[self.index] = f(x[self.index])
        return out


@dataclass(frozen=True)
class DrawGroup:
    """The rows of a batch that choose in the same way. Columns are float32 [len(rows), 1]."""

    draw: Draw
    subset: RowSubset
    inverse_temperature: mx.array
    top_k: mx.array  # int32
    top_p: mx.array
    min_p: mx.array
    has_min_p: bool


@dataclass(frozen=True)
class PenaltyGroup:
    subset: RowSubset
    slots: tuple[int, ...]
    repetition: mx.array | None  # float32 [len(slots), 1]; None: no row asks for it
    presence: mx.array
    frequency: mx.array


@dataclass(frozen=True)
class BiasEdits:
    """Single logits to add to: logit_bias, and the stop ids of rows short of min_tokens."""

    rows: mx.array  # int32 [n]
    ids: mx.array  # int32 [n]
    values: mx.array  # float32 [n]


@dataclass(frozen=True)
class LogprobGroup:
    subset: RowSubset
    places: mx.array | None  # int32 [num_rows]: where a row's result is; None: in order
    num_top: int


@dataclass(frozen=True)
class SampleBatch:
    """All that is constant while the same slots are sampled."""

    states: tuple[SlotSampling, ...]
    vocab_size: int
    streams: np.ndarray  # uint64 [num_rows]
    penalties: PenaltyGroup | None
    edits: BiasEdits | None
    logprobs: LogprobGroup | None

    @cached_property
    def choices(self) -> mx.array:
        """float32 [num_rows, 4]: how each row chooses, for one operation over all of them."""
        return mx.array([_choice(state, self.vocab_size) for state in self.states])

    @cached_property
    def draws(self) -> tuple[DrawGroup, ...]:
        """The same for mlx's operations, which are over rows that choose alike."""
        by_draw: dict[Draw, list[int]] = {}
        for row, state in enumerate(self.states):
            by_draw.setdefault(state.draw(self.vocab_size), []).append(row)
        return tuple(_draw_group(draw, rows, self.states) for draw, rows in by_draw.items())

    @cached_property
    def places(self) -> mx.array | None:
        """int32 [num_rows]: a row's place in the draws' concatenation."""
        return _places([group.subset.rows for group in self.draws], len(self.states))


def build_batch(
    slots: tuple[int, ...],
    states: Sequence[SlotSampling],
    short_of_min_tokens: tuple[int, ...],
    vocab_size: int,
) -> SampleBatch:
    return SampleBatch(
        states=tuple(states),
        vocab_size=vocab_size,
        streams=np.array([state.stream for state in states], dtype=np.uint64),
        penalties=_penalty_group(slots, states),
        edits=_bias_edits(states, short_of_min_tokens),
        logprobs=_logprob_group(states),
    )


def _choice(state: SlotSampling, vocab_size: int) -> tuple[float, float, float, float]:
    """1 / temperature, top_k, top_p, min_p, each as the operation wants it where it is off."""
    params, draw = state.params, state.draw(vocab_size)
    if draw is Draw.GREEDY:
        return 0.0, 0.0, np.inf, 0.0
    top_k = params.top_k if draw in (Draw.SHORT_TOP_K, Draw.LONG_TOP_K) else 0
    return 1.0 / params.temperature, top_k, _top_p(params), params.min_p


def _top_p(params: SamplingParams) -> float:
    """Infinite where off: rounding in a cumulative sum must not drop a token."""
    return params.top_p if params.top_p < 1.0 else np.inf


def _draw_group(draw: Draw, rows: list[int], states: Sequence[SlotSampling]) -> DrawGroup:
    params = [states[row].params for row in rows]
    return DrawGroup(
        draw=draw,
        subset=RowSubset.of(rows, len(states)),
        inverse_temperature=_column([1.0 / max(p.temperature, GREEDY_BELOW) for p in params]),
        top_k=_column([p.top_k for p in params]).astype(mx.int32),
        top_p=_column([_top_p(p) for p in params]),
        min_p=_column([p.min_p for p in params]),
        has_min_p=any(p.min_p > 0.0 for p in params),
    )


def _penalty_group(slots: tuple[int, ...], states: Sequence[SlotSampling]) -> PenaltyGroup | None:
    rows = [row for row, state in enumerate(states) if state.params.has_penalties]
    if not rows:
        return None
    params = [states[row].params for row in rows]
    repeats = any(p.repetition_penalty != 1.0 for p in params)
    return PenaltyGroup(
        subset=RowSubset.of(rows, len(states)),
        slots=tuple(slots[row] for row in rows),
        repetition=_column([p.repetition_penalty for p in params]) if repeats else None,
        presence=_column([p.presence_penalty for p in params]),
        frequency=_column([p.frequency_penalty for p in params]),
    )


def _bias_edits(
    states: Sequence[SlotSampling], short_of_min_tokens: tuple[int, ...]
) -> BiasEdits | None:
    edits = [(row, i, b) for row, s in enumerate(states) for i, b in s.params.logit_bias.items()]
    edits += [(row, i, -FAR) for row in short_of_min_tokens for i in states[row].stop_ids]
    if not edits:
        return None
    rows, ids, values = zip(*edits, strict=True)
    return BiasEdits(
        mx.array(rows, dtype=mx.int32),
        mx.array(ids, dtype=mx.int32),
        mx.array(values, dtype=mx.float32),
    )


def _logprob_group(states: Sequence[SlotSampling]) -> LogprobGroup | None:
    asked = {row: k for row, s in enumerate(states) if (k := s.params.logprobs) is not None}
    if not asked:
        return None
    subset = RowSubset.of(list(asked), len(states))
    return LogprobGroup(subset, _places([subset.rows], len(states)), max(asked.values()))


def _places(groups: Sequence[tuple[int, ...]], num_rows: int) -> mx.array | None:
    """Where each row is in the groups' concatenation; rows in no group point at place 0."""
    places = np.zeros(num_rows, np.int32)
    order = [row for rows in groups for row in rows]
    places[order] = np.arange(len(order))
    return None if order == list(range(num_rows)) else mx.array(places)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(np.array(values, dtype=np.float32)[:, None])


@dataclass
class TokenHistory:
    """Token counts of penalised slots: rows of [vocab_size], held only while a slot lives.

    The rows of the slots sampled last are kept stacked in one table, the value that a step makes
    and the next one reads; other slots keep rows of their own. A table over all slots would be
    copied whole at every step, because the step in flight still reads it.
    """

    vocab_size: int
    _prompts: dict[int, mx.array] = field(default_factory=dict)  # bool [vocab_size] by slot
    _counts: dict[int, mx.array] = field(default_factory=dict)  # float32 [vocab_size] by slot
    _stacked: tuple[int, ...] = ()
    _prompt_table: mx.array | None = None  # bool [len(_stacked), vocab_size]
    _count_table: mx.array | None = None  # float32 [len(_stacked), vocab_size]

    def admit(self, slot: int, prompt: np.ndarray, reply: np.ndarray) -> None:
        self.retire(slot)
        seen = np.zeros(self.vocab_size, dtype=np.bool_)
        seen[prompt] = True
        self._prompts[slot] = mx.array(seen)
        self._counts[slot] = self._counted(reply)

    def count(self, slot: int, tokens: np.ndarray) -> None:
        """These have been written by a slot."""
        self._unstack()
        self._counts[slot] = self._counts[slot] + self._counted(tokens)

    def retire(self, slot: int) -> None:
        if slot in self._counts:
            self._unstack()
            del self._prompts[slot], self._counts[slot]

    def tables(self, slots: tuple[int, ...]) -> tuple[mx.array, mx.array]:
        """What the prompts hold, bool, and counts in the replies, float32: [len(slots), V]."""
        if slots != self._stacked or self._prompt_table is None or self._count_table is None:
            self._unstack()
            self._stacked = slots
            self._prompt_table = mx.stack([self._prompts[slot] for slot in slots])
            self._count_table = mx.stack([self._counts[slot] for slot in slots])
        return self._prompt_table, self._count_table

    def append(self, slots: tuple[int, ...], tokens: mx.array) -> mx.array:
        """Count one more token, int32 [len(slots)], of each slot; returns the new table."""
        _, counts = self.tables(slots)
        self._count_table = counts.at[mx.arange(len(slots)), tokens].add(1.0)
        return self._count_table

    def _counted(self, tokens: np.ndarray) -> mx.array:
        counts = np.bincount(tokens, minlength=self.vocab_size)
        return mx.array(counts.astype(np.float32))

    def _unstack(self) -> None:
        if self._count_table is not None:
            for row, slot in enumerate(self._stacked):
                self._counts[slot] = self._count_table[row]
        self._stacked, self._prompt_table, self._count_table = (), None, None
