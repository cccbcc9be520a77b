"""Sampling parameters of the rows of a batch, built in numpy and sent to the device once; and which
tokens penalised slots have read and written.

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


class TokenHistory(Generic[A]):
    """Rows of [vocab_size], kept only while a slot runs.

    The rows of the slots sampled last are stacked in one table, the value that a step makes and the
    next one reads; other slots keep rows of their own. A table over all slots would be copied whole
    at every step where arrays are values (mlx), because the step in flight still reads it.
    """

    def __init__(
        self,
        vocab_size: int,
        send: Send[A],
        stack: Callable[[Sequence[A]], A],
        count_each: Callable[[A, A], A],
    ) -> None:
        """`count_each`: a table of counts with one more of each row's token."""
        self._vocab_size = vocab_size
        self._send = send
        self._stack = stack
        self._count_each = count_each
        self._prompts: dict[int, A] = {}  # bool [vocab_size] by slot
        self._counts: dict[int, A] = {}  # float32 [vocab_size] by slot
        self._stacked: tuple[int, ...] = ()
        self._tables: tuple[A, A] | None = None  # of prompts and counts: [len(_stacked), V]

    def admit(self, slot: int, prompt: np.ndarray, reply: np.ndarray) -> None:
        self.retire(slot)
        seen = np.zeros(self._vocab_size, dtype=np.bool_)
        seen[prompt] = True
        self._prompts[slot] = self._send(seen)
        self._counts[slot] = self._counted(reply)

    def count(self, slot: int, tokens: np.ndarray) -> None:
        """The slot has written these."""
        self._unstack()
        self._counts[slot] = self._counts[slot] + self._counted(tokens)

    def retire(self, slot: int) -> None:
        if slot in self._counts:
            self._unstack()
            del self._prompts[slot], self._counts[slot]

    def tables(self, slots: tuple[int, ...]) -> tuple[A, A]:
        """What the prompts contain, bool, and counts in the replies, float32: [len(slots), V]."""
        if slots != self._stacked or self._tables is None:
            self._unstack()
            self._stacked = slots
            prompts = self._stack([self._prompts[slot] for slot in slots])
            self._tables = prompts, self._stack([self._counts[slot] for slot in slots])
        return self._tables

    def append(self, slots: tuple[int, ...], tokens: A) -> A:
        """Count one more token, [len(slots)], of each slot; returns the new table of counts."""
        prompts, counts = self.tables(slots)
        counts = self._count_each(counts, tokens)
        self._tables = prompts, counts
        return counts

    def _counted(self, tokens: np.ndarray) -> A:
        counts = np.bincount(tokens, minlength=self._vocab_size)
        return self._send(counts.astype(np.float32))

    def _unstack(self) -> None:
        if self._tables is not None:
            for row, slot in enumerate(self._stacked):
                self._counts[slot] = self._tables[1][row]
        self._stacked, self._tables = (), None
