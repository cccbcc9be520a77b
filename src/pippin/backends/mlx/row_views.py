"""What a model sees of the decode rows in one step: cache views, masks and split attention.

Scores over main and tail are concatenated before the softmax; keys and values never are. A model
that attends in its own way gets one concatenated KV instead: right, but slower.

A step is a tree of arrays and a few host facts (`StepShape`). Steps of equal shape build the same
graph, so that the graph can be compiled once; nothing here reads a value back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from pippin.backends.mlx.layout import Layout, Leaf
from pippin.types import GRID

Tree = dict[str, Any]


@dataclass(frozen=True)
class RowMask:
    """Passed by the model, untouched, from `make_mask` to the substituted attention function."""

    window: int | None


@dataclass(frozen=True)
class CohortShape:
    num_lines: int
    columns: tuple[int, ...]  # by window class of the layout
    full: tuple[bool, ...]  # by window class: every line fills every column


@dataclass(frozen=True)
class StepShape:
    """What the host knows of a step and its graph depends on."""

    width: int
    cohorts: tuple[CohortShape, ...]
    aligned: bool  # one cohort whose lines are the rows, in order: nothing needs to be gathered


class DecodeStep:
    """One step's shared arrays, and masks made from them once for all layers.

    tokens   int32 [width, 1]
    offset   int32 [width]        where each row's token stands
    cursor   int32 [1]            the tail column that is written
    written  bool  [width, GRID]  tail columns that hold a token of their row
    order    int32 [width]        each row's line among all cohorts' lines; a blank one comes last
    tails    [keys, values] by KV leaf: [width, heads, GRID, dim]
    states   entries by state leaf: [width, ...]
    cohorts  kv by KV leaf: [lines, heads, columns, dim]; lines: the row of each line;
             lengths: its tokens; stored: by window class, how many of them are in the columns
    """

    def __init__(self, layout: Layout, shape: StepShape, tree: Tree) -> None:
        self.layout = layout
        self.shape = shape
        self.tree = tree
        self._tail_masks: dict[int | None, mx.array] = {}
        self._main_masks: dict[object, mx.array | None] = {}

    def tail_mask(self, window: int | None) -> mx.array:
        """bool [width, 1, 1, GRID]"""
        narrow = window if window is not None and window < GRID else None
        if narrow not in self._tail_masks:
            visible: mx.array = self.tree["written"]
            if narrow is not None:
                age = mx.cumsum(visible.astype(mx.int32), axis=1, reverse=True)  # newest: 1
                visible = visible & (age <= narrow)
            self._tail_masks[narrow] = visible[:, None, None, :]
        return self._tail_masks[narrow]

    def main_mask(self, number: int, leaf: Leaf, window: int | None) -> mx.array | None:
        """bool [lines, 1, 1, columns], or None where every line fills every column."""
        key = (number, leaf.window, window)
        if key not in self._main_masks:
            self._main_masks[key] = self._build_main_mask(number, leaf, window)
        return self._main_masks[key]

    def _build_main_mask(self, number: int, leaf: Leaf, window: int | None) -> mx.array | None:
        place = self.layout.window_classes.index(leaf.window)
        shape, cohort = self.shape.cohorts[number], self.tree["cohorts"][number]
        if window is None and shape.full[place]:
            return None
        column = mx.arange(shape.columns[place])[None]
        stored = cohort["stored"][place][:, None]
        visible: mx.array = column < stored
        if window is not None:
            position = mx.take(self.tree["offset"], cohort["lines"])[:, None]
            first = cohort["lengths"][:, None] - stored  # position of column 0
            visible = visible & (first + column > position - window)
        return visible[:, None, None, :]


class RowKV:
    """The cache view of one attention layer during a decode step."""

    def __init__(self, step: DecodeStep, leaf: Leaf, place: int) -> None:
        self.leaf = leaf
        self.step = step
        self.offset = step.tree["offset"]
        self.tail: list[mx.array] = list(step.tree["tails"][place])
        self._mains = [cohort["kv"][place] for cohort in step.tree["cohorts"]]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        at = self.step.tree["cursor"]
        self.tail = [
            mx.slice_update(self.tail[0], keys, at, (2,)),
            mx.slice_update(self.tail[1], values, at, (2,)),
        ]
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
        if not self._mains:
            weights = _softmax([tail_scores], sink)
            out = weights @ self.tail[1]
        elif step.shape.aligned:
            scores = self._main_scores(0, q, window, blocked)
            columns = scores.shape[-1]
            weights = _softmax([scores, tail_scores], sink)
            out = weights[..., :columns] @ self._mains[0][1]
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
        tree = self.step.tree
        outs, tail_weights = [], []
        for number, (_, values) in enumerate(self._mains):
            lines = tree["cohorts"][number]["lines"]
            scores = self._main_scores(number, mx.take(q, lines, axis=0), window, blocked)
            columns = scores.shape[-1]
            weights = _softmax([scores, mx.take(tail_scores, lines, axis=0)], sink)
            outs.append(weights[..., :columns] @ values)
            tail_weights.append(weights[..., columns:])
        out = self._in_row_order(outs)
        return out + self._in_row_order(tail_weights) @ self.tail[1]

    def _main_scores(
        self, number: int, q: mx.array, window: int | None, blocked: mx.array
    ) -> mx.array:
        scores = q @ self._mains[number][0].swapaxes(-1, -2)
        mask = self.step.main_mask(number, self.leaf, window)
        return scores if mask is None else mx.where(mask, scores, blocked)

    def _in_row_order(self, lines: list[mx.array]) -> mx.array:
        blank = mx.zeros_like(lines[0][:1])  # for rows that nobody holds
        return mx.take(mx.concatenate([*lines, blank], axis=0), self.step.tree["order"], axis=0)

    def _concatenated(self, side: int) -> mx.array:
        if not self._mains:
            return self.tail[side]
        longest = max(main[side].shape[2] for main in self._mains)
        main = self._in_row_order([_pad(main[side], longest) for main in self._mains])
        return mx.concatenate([main, self.tail[side]], axis=2)

    def _concatenated_mask(self, window: int | None) -> mx.array:
        tail = self.step.tail_mask(window)
        if not self._mains:
            return tail
        longest = max(main[0].shape[2] for main in self._mains)
        lines = []
        for number, (keys, _) in enumerate(self._mains):
            mask = self.step.main_mask(number, self.leaf, window)
            if mask is None:
                mask = mx.ones((keys.shape[0], 1, 1, keys.shape[2]), mx.bool_)
            lines.append(_pad(mask.swapaxes(-1, -2), longest).swapaxes(-1, -2))
        return mx.concatenate([self._in_row_order(lines), tail], axis=-1)


class StepViews:
    """Every layer's view of a step, and all of them as the model is called with.

    Not part of the step, which the views hold: a cycle would keep tails, states and mains of past
    steps until Python's cycle collector comes by.
    """

    def __init__(self, step: DecodeStep) -> None:
        leaves, kv_indices = step.layout.leaves, step.layout.kv_indices
        self.kv = [RowKV(step, leaves[index], place) for place, index in enumerate(kv_indices)]
        self.states: list[Any] = []
        for entries in step.tree["states"]:
            view: Any = ArraysCache(size=len(entries))
            view.cache = list(entries)
            self.states.append(view)
        kv, states = iter(self.kv), iter(self.states)
        self.caches = step.layout.nest([next(states if leaf.is_state else kv) for leaf in leaves])


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
