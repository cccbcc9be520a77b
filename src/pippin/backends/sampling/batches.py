"""Sampling parameters of the rows of a batch: built in numpy, sent to the device once. Draws none.

`A` is a backend's array, `Send` what copies a numpy array to its device. All of it is constant
while the same slots are sampled, so a batch is used for many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from pippin.backends.sampling.rules import FAR, Draw, SlotSampling


class DeviceArray(Protocol):
    def __getitem__(self, key: Any, /) -> Any: ...
    def __add__(self, other: Any, /) -> Any: ...


A = TypeVar("A", bound=DeviceArray)
Send = Callable[[np.ndarray], A]


@dataclass(frozen=True)
class RowSubset(Generic[A]):
    """Some rows of a batch, or all of them; work on all of them gathers and scatters nothing."""

    rows: tuple[int, ...]
    index: A | None  # int64 [len(rows)]; None: every row, in order

    def take(self, x: A) -> A:
        if self.index is None:
            return x
        part: A = x[self.index]
        return part


@dataclass(frozen=True)
class DrawGroup(Generic[A]):
    """The rows of a batch that choose in the same way. Columns are float32 [len(rows), 1]."""

    draw: Draw
    subset: RowSubset[A]
    inverse_temperature: A
    top_k: A  # int32
    top_p: A  # infinite where off
    min_p: A
    has_min_p: bool


@dataclass(frozen=True)
class PenaltyGroup(Generic[A]):
    subset: RowSubset[A]
    slots: tuple[int, ...]
    repetition: A | None  # float32 [len(slots), 1]; None: no row asks for it
    presence: A
    frequency: A


@dataclass(frozen=True)
class BiasEdits(Generic[A]):
    """Single logits to add to: logit_bias, and the stop ids of rows short of min_tokens."""

    rows: A  # int64 [n]
    ids: A  # int64 [n]
    values: A  # float32 [n]


@dataclass(frozen=True)
class LogprobGroup(Generic[A]):
    subset: RowSubset[A]
    num_top: int


class SampleBatch(Generic[A]):
    def __init__(
        self,
        slots: tuple[int, ...],
        states: Sequence[SlotSampling],
        short_of_min_tokens: Sequence[int],  # rows
        vocab_size: int,
        send: Send[A],
    ) -> None:
        self._slots = slots
        self._states = states
        self._short_of_min_tokens = short_of_min_tokens
        self._vocab_size = vocab_size
        self._send = send
        self.streams = np.array([state.stream for state in states], dtype=np.uint64)

    @cached_property
    def choices(self) -> A:
        """float32 [num_rows, 4]: how each row chooses, for one operation over all of them."""
        rows = [state.choice(self._vocab_size) for state in self._states]
        return self._send(np.array(rows, dtype=np.float32))

    @cached_property
    def draws(self) -> tuple[DrawGroup[A], ...]:
        """The same for operations over rows that choose alike."""
        by_draw: dict[Draw, list[int]] = {}
        for row, state in enumerate(self._states):
            by_draw.setdefault(state.draw(self._vocab_size), []).append(row)
        return tuple(self._draw_group(draw, rows) for draw, rows in by_draw.items())

    def _draw_group(self, draw: Draw, rows: Sequence[int]) -> DrawGroup[A]:
        states = [self._states[row] for row in rows]
        return DrawGroup(
            draw=draw,
            subset=self._subset(rows),
            inverse_temperature=self._column([state.inverse_temperature for state in states]),
            top_k=self._column([state.params.top_k for state in states], np.int32),
            top_p=self._column([state.top_p for state in states]),
            min_p=self._column([state.params.min_p for state in states]),
            has_min_p=any(state.params.min_p > 0.0 for state in states),
        )

    @cached_property
    def penalties(self) -> PenaltyGroup[A] | None:
        rows = [row for row, state in enumerate(self._states) if state.params.has_penalties]
        if not rows:
            return None
        params = [self._states[row].params for row in rows]
        repeats = any(p.repetition_penalty != 1.0 for p in params)
        return PenaltyGroup(
            subset=self._subset(rows),
            slots=tuple(self._slots[row] for row in rows),
            repetition=self._column([p.repetition_penalty for p in params]) if repeats else None,
            presence=self._column([p.presence_penalty for p in params]),
            frequency=self._column([p.frequency_penalty for p in params]),
        )

    @cached_property
    def edits(self) -> BiasEdits[A] | None:
        states = list(enumerate(self._states))
        edits = [(row, i, bias) for row, s in states for i, bias in s.params.logit_bias.items()]
        short = [(row, self._states[row]) for row in self._short_of_min_tokens]
        edits += [(row, i, -FAR) for row, state in short for i in state.stop_ids]
        if not edits:
            return None
        rows, ids, values = zip(*edits, strict=True)
        types = (np.int64, np.int64, np.float32)
        columns = zip((rows, ids, values), types, strict=True)
        return BiasEdits(*(self._send(np.array(column, dtype)) for column, dtype in columns))

    @cached_property
    def logprobs(self) -> LogprobGroup[A] | None:
        states = enumerate(self._states)
        asked = {row: k for row, s in states if (k := s.params.logprobs) is not None}
        return LogprobGroup(self._subset(list(asked)), max(asked.values())) if asked else None

    def _subset(self, rows: Sequence[int]) -> RowSubset[A]:
        whole = len(rows) == len(self._states)
        return RowSubset(tuple(rows), None if whole else self._send(np.array(rows, np.int64)))

    def _column(self, values: Sequence[float], dtype: type[np.generic] = np.float32) -> A:
        return self._send(np.array(values, dtype)[:, None])
