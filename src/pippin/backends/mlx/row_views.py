"""What a model sees of the decode rows in one step: cache views, masks and split attention.

Scores over main and tail are concatenated before the softmax; keys and values never are. A model
that attends in its own way gets one concatenated KV instead: right, but slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.cohorts import Cohort
from pippin.backends.mlx.layout import Leaf
from pippin.backends.mlx.packing import KV
from pippin.types import GRID


@dataclass(frozen=True)
class RowMask:
    """Passed by the model, untouched, from `make_mask` to the substituted attention function."""

    window: int | None


@dataclass
class DecodeStep:
    """One step's shared facts, the same for every layer."""

    width: int
    cursor: int
    cohorts: Sequence[Cohort]
    positions: np.ndarray  # int32 [width]: of the token that each row computes now
    written: np.ndarray  # bool [width, GRID], this step's column included
    offset: mx.array
    caches: list[Any] = field(default_factory=list)
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))

    @classmethod
    def build(
        cls,
        width: int,
        cursor: int,
        written: np.ndarray,
        cohorts: Sequence[Cohort],
        positions: np.ndarray,
    ) -> DecodeStep:
        visible = written.copy()
        visible[:, cursor] = True  # also for rows that do not matter: no row sees nothing
        return cls(width, cursor, cohorts, positions, visible, mx.array(positions))

    def __post_init__(self) -> None:
        self._lines: dict[int, mx.array] = {}
        self._masks: dict[object, mx.array | None] = {}
        self._order: mx.array | None = None

    @cached_property
    def aligned(self) -> bool:
        """One cohort whose lines are the rows, in order: nothing needs to be gathered."""
        if len(self.cohorts) != 1 or len(self.cohorts[0].indices) != self.width:
            return False
        return all(index in (line, -1) for line, index in enumerate(self.cohorts[0].indices))

    def lines(self, number: int) -> mx.array:
        """Row index of each line of a cohort; lines whose row has left read row 0."""
        if number not in self._lines:
            indices = np.maximum(np.array(self.cohorts[number].indices, dtype=np.int32), 0)
            self._lines[number] = mx.array(indices)
        return self._lines[number]

    def order(self) -> mx.array:
        """For each row, its line among all cohorts' lines, one blank line at the end."""
        if self._order is None:
            indices = [index for cohort in self.cohorts for index in cohort.indices]
            order = np.full(self.width, len(indices), dtype=np.int32)
            for line, index in enumerate(indices):
                if index >= 0:
                    order[index] = line
            self._order = mx.array(order)
        return self._order

    def tail_mask(self, window: int | None) -> mx.array:
        """bool [width, 1, 1, GRID]"""
        key = ("tail", window if window is not None and window < GRID else None)
        if key not in self._masks:
            visible = self.written
            if key[1] is not None:
                age = np.cumsum(visible[:, ::-1], axis=1)[:, ::-1]  # 1 for a row's newest token
                visible = visible & (age <= window)
            self._masks[key] = mx.array(visible[:, None, None, :])
        mask = self._masks[key]
        assert mask is not None
        return mask

    def main_mask(self, number: int, leaf: int, window: int | None) -> mx.array | None:
        """bool [lines, 1, 1, columns], or None where every line fills every column."""
        cohort = self.cohorts[number]
        columns = cohort.columns(leaf)
        if window is None:  # the same in every step of the cohort's life
            masks, key = cohort.padding_masks, columns
        else:
            masks, key = self._masks, ("main", number, columns, window)  # type: ignore[assignment]
        if key not in masks:
            stored = [line[leaf] for line in cohort.stored]
            masks[key] = self._build_main_mask(cohort, stored, columns, window)
        return masks[key]

    def _build_main_mask(
        self, cohort: Cohort, stored: Sequence[int], columns: int, window: int | None
    ) -> mx.array | None:
        column = np.arange(columns)[None, :]
        own = np.array(stored)[:, None]
        visible = column < own
        if window is not None:
            position = np.array([self.positions[max(i, 0)] for i in cohort.indices])[:, None]
            first = np.array(cohort.lengths)[:, None] - own  # position of column 0
            visible = visible & (first + column > position - window)
        if bool(visible.all()):
            return None
        return mx.array(visible[:, None, None, :])


class RowKV:
    """The cache view of one attention layer during a decode step."""

    def __init__(self, index: int, leaf: Leaf, step: DecodeStep, tail: KV) -> None:
        self.index = index
        self.leaf = leaf
        self.step = step
        self.tail = tail
        self.offset = step.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        at = self.step.cursor
        self.tail[0][:, :, at : at + 1] = keys
        self.tail[1][:, :, at : at + 1] = values
        if self.leaf.splits:
            return keys, values  # not looked at: attention reads the view itself
        return self._concatenated(0), self._concatenated(1)

    def make_mask(
        self,
        N: int,  # noqa: N803 (mlx-lm's name)
        return_array: bool = False,
        window_size: int | None = None,
    ) -> Any:
        window = window_size or self.leaf.window
        return RowMask(window) if self.leaf.splits else self._concatenated_mask(window)

    def attend(
        self, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        """softmax(q [main | tail]^T) [main | tail] without joining main and tail."""
        step = self.step
        width, q_heads, _, dim = queries.shape
        kv_heads = self.tail[0].shape[1]
        repeats = q_heads // kv_heads
        q = (queries * scale).reshape(width, kv_heads, repeats, dim)
        blocked = mx.array(mx.finfo(q.dtype).min, q.dtype)
        tail_scores = q @ self.tail[0].swapaxes(-1, -2)
        tail_scores = mx.where(step.tail_mask(window), tail_scores, blocked)
        sink = None if sinks is None else sinks.astype(q.dtype).reshape(1, kv_heads, repeats, 1)
        if not step.cohorts:
            weights = _softmax([tail_scores], sink)
            out = weights @ self.tail[1]
        elif step.aligned:
            scores = self._main_scores(0, q, window, blocked)
            columns = scores.shape[-1]
            weights = _softmax([scores, tail_scores], sink)
            out = weights[..., :columns] @ step.cohorts[0].kv[self.index][1]
            out = out + weights[..., columns:] @ self.tail[1]
        else:
            out = self._attend_cohorts(q, tail_scores, sink, window, blocked)
        return out.reshape(width, q_heads, 1, out.shape[-1])

    def _attend_cohorts(
        self,
        q: mx.array,
        tail_scores: mx.array,
        sink: mx.array | None,
        window: int | None,
        blocked: mx.array,
    ) -> mx.array:
        step = self.step
        outs, tail_weights = [], []
        for number, cohort in enumerate(step.cohorts):
            lines = step.lines(number)
            scores = self._main_scores(number, mx.take(q, lines, axis=0), window, blocked)
            columns = scores.shape[-1]
            weights = _softmax([scores, mx.take(tail_scores, lines, axis=0)], sink)
            outs.append(weights[..., :columns] @ cohort.kv[self.index][1])
            tail_weights.append(weights[..., columns:])
        outs.append(mx.zeros_like(outs[0][:1]))
        tail_weights.append(mx.zeros_like(tail_weights[0][:1]))
        order = step.order()
        out = mx.take(mx.concatenate(outs, axis=0), order, axis=0)
        weights = mx.take(mx.concatenate(tail_weights, axis=0), order, axis=0)
        return out + weights @ self.tail[1]

    def _main_scores(
        self, number: int, q: mx.array, window: int | None, blocked: mx.array
    ) -> mx.array:
        scores = q @ self.step.cohorts[number].kv[self.index][0].swapaxes(-1, -2)
        mask = self.step.main_mask(number, self.index, window)
        return scores if mask is None else mx.where(mask, scores, blocked)

    def _concatenated(self, side: int) -> mx.array:
        step = self.step
        if not step.cohorts:
            return self.tail[side]
        longest = max(cohort.columns(self.index) for cohort in step.cohorts)
        lines = [_pad(cohort.kv[self.index][side], longest) for cohort in step.cohorts]
        lines.append(mx.zeros_like(lines[0][:1]))
        main = mx.take(mx.concatenate(lines, axis=0), step.order(), axis=0)
        return mx.concatenate([main, self.tail[side]], axis=2)

    def _concatenated_mask(self, window: int | None) -> mx.array:
        step = self.step
        tail = step.tail_mask(window)
        if not step.cohorts:
            return tail
        longest = max(cohort.columns(self.index) for cohort in step.cohorts)
        lines = []
        for number, cohort in enumerate(step.cohorts):
            mask = step.main_mask(number, self.index, window)
            if mask is None:
                mask = mx.ones((len(cohort.indices), 1, 1, cohort.columns(self.index)), mx.bool_)
            lines.append(_pad(mask.swapaxes(-1, -2), longest).swapaxes(-1, -2))
        lines.append(mx.zeros_like(lines[0][:1]))
        main = mx.take(mx.concatenate(lines, axis=0), step.order(), axis=0)
        return mx.concatenate([main, tail], axis=-1)


def _softmax(scores: list[mx.array], sink: mx.array | None) -> mx.array:
    """Over all pieces together; a sink takes weight but gives no value."""
    if sink is not None:
        scores = [*scores, mx.broadcast_to(sink, (*scores[0].shape[:-1], 1))]
    joined = scores[0] if len(scores) == 1 else mx.concatenate(scores, axis=-1)
    weights = mx.softmax(joined, axis=-1, precise=True)
    return weights if sink is None else weights[..., :-1]


def _pad(array: mx.array, columns: int) -> mx.array:
    missing = columns - array.shape[2]
    return array if missing == 0 else mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)])
