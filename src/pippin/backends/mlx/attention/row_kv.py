"""What an attention layer sees of the decode rows in one step: its cache view.

Attention reads main and tail where they lie (split_attention.py). A layer that attends in its own
way gets one concatenated KV instead: right, but slower; the others go on as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from pippin.backends.mlx.attention.decode_step import CohortsShape, DecodeStep, RowMask
from pippin.backends.mlx.attention.lent_kv import LentArray, lend
from pippin.backends.mlx.attention.paths import Path
from pippin.backends.mlx.attention.split_attention import (
    attend,
    attend_shared,
    masked,
    shared_scores,
    softmax,
)
from pippin.backends.mlx.layout import LayerCache
from pippin.backends.mlx.payloads.packing import KV


class RowKV:
    """The cache view of one attention layer during a decode step."""

    def __init__(self, step: DecodeStep, cache: LayerCache, place: int) -> None:
        self.layer_cache = cache
        self.step = step
        self.offset = step.tree["offset"]
        self.tail: list[mx.array] = list(step.tree["tails"][place])
        self._new: KV | None = None  # what the model was given, also for layers that borrow it
        cohorts = step.tree.get("cohorts", ())
        self._mains = [cohort["kv"][place] for cohort in cohorts]
        self._shared = [cohort["shared"][place] for cohort in cohorts]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = self.layer_cache.kept(keys, values)
        self.tail = self._written(keys, values)
        if self.layer_cache.splits:
            return self._handed_out(keys, values)
        self._new = self._concatenated(0), self._concatenated(1)
        self.keys, self.values = self._new  # mlx-lm's names: a model may read and replace them
        return self._new

    def keys_and_values(self) -> tuple[LentArray, LentArray]:
        assert self._new is not None, "no layer has written this cache yet"
        return lend(self._new, self.offset + 1)

    def _written(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """The tail with the step's column."""
        at = self.step.tree["cursor"]
        return [
            mx.slice_update(self.tail[0], keys, at, (2,)),
            mx.slice_update(self.tail[1], values, at, (2,)),
        ]

    def _handed_out(self, keys: mx.array, values: mx.array) -> KV:
        """Not looked at: attention reads the view itself, which is found by these if lent."""
        self._new = keys, values
        self.step.lenders[id(keys)] = self
        return keys, values

    def lends(self, keys: mx.array) -> bool:
        return self._new is not None and keys is self._new[0]

    def make_mask(
        self,
        N: int,  # noqa: N803 (mlx-lm's name)
        return_array: bool = False,
        window_size: int | None = None,
    ) -> Any:
        window = window_size or self.layer_cache.window
        if self.step.layout.splits:
            return RowMask(window, self.step)
        # The model may pass it to layers that attend in their own way, too.
        mask = self._concatenated_mask(window)
        if self.step.layout.groups_heads:
            mask = mask[:, None]
        self.step.note_window(mask, window)
        return mask

    def attend_masked(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """With a mask of this step: `make_mask` of some layer's view has made it."""
        return self.attend(queries, scale, self.step.window_of(mask), sinks)

    def attend(
        self, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        """softmax(q [shared | main | tail]^T) [shared | main | tail], as a rule without joining."""
        step = self.step
        if self._is_to_join(queries, sinks):
            keys, values = self._concatenated(0), self._concatenated(1)
            mask = self._concatenated_mask(window)
            return mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=scale, mask=mask, sinks=sinks
            )
        width, q_heads, _, dim = queries.shape
        kv_heads = self.tail[0].shape[1]
        repeats = q_heads // kv_heads
        q = (queries * scale).reshape(width, kv_heads, repeats, dim)
        tail_scores = masked(self._scores(q, self.tail), step.tail_mask(self.layer_cache, window))
        sink = None if sinks is None else sinks.astype(q.dtype).reshape(1, kv_heads, repeats, 1)
        tail_values = self._values(self.tail)
        if not self._mains:
            out = softmax([tail_scores], sink) @ tail_values
        elif step.aligned:
            out, weights = self._attend_cohort(0, q, tail_scores, sink, window)
            out = out + weights @ tail_values
        else:
            found = []
            for number, cohort in enumerate(step.tree["cohorts"]):
                own_q, own_tail = (mx.take(x, cohort["lines"], axis=0) for x in (q, tail_scores))
                found.append(self._attend_cohort(number, own_q, own_tail, sink, window))
            out, weights = (self._in_row_order(list(part)) for part in zip(*found, strict=True))
            out = out + weights @ tail_values
        return out.reshape(width, q_heads, 1, out.shape[-1])

    def _is_to_join(self, queries: mx.array, sinks: mx.array | None) -> bool:
        """Rows that lie side by side anyway, where copying them takes less than many launches."""
        mains = self.step.shape.mains
        if not (isinstance(mains, CohortsShape) and mains.aligned) or any(self._shared):
            return False
        keys, values = self._mains[0]
        return mains.paths.of_cohort(queries, (keys, values), sinks) is Path.JOINED

    def _attend_cohort(
        self,
        number: int,
        q: mx.array,
        tail_scores: mx.array,
        sink: mx.array | None,
        window: int | None,
    ) -> tuple[mx.array, mx.array]:
        """What the cohort's lines get from all but the tail, and how they weigh the tail."""
        main, shared = self._mains[number], self._shared[number]
        scores = masked(
            self._scores(q, main), self.step.main_mask(number, self.layer_cache, window)
        )
        if not shared:
            return attend(scores, tail_scores, self._values(main), sink)
        mask = self.step.shared_mask(number, shared[0].shape[2], window)
        together = masked(self._shared_scores(q, shared), mask)
        values, shared_values = self._values(main), self._values(shared)
        return attend_shared(together, scores, tail_scores, shared_values, values, sink)

    def _scores(self, q: mx.array, piece: Sequence[mx.array]) -> mx.array:
        return q @ piece[0].swapaxes(-1, -2)

    def _shared_scores(self, q: mx.array, piece: Sequence[mx.array]) -> mx.array:
        return shared_scores(q, piece[0])

    def _values(self, piece: Sequence[mx.array]) -> mx.array:
        return piece[1]

    def _in_row_order(self, lines: list[mx.array]) -> mx.array:
        blank = mx.zeros_like(lines[0][:1])  # for rows of no request
        return mx.take(mx.concatenate([*lines, blank], axis=0), self.step.tree["order"], axis=0)

    def _concatenated(self, side: int) -> mx.array:
        return self._joined([main[side] for main in self._mains], self.tail[side])

    def _concatenated_mask(self, window: int | None) -> mx.array:
        masks = []
        for number, (keys, _) in enumerate(self._mains):
            mask = self.step.main_mask(number, self.layer_cache, window)
            if mask is None:
                mask = mx.ones((keys.shape[0], 1, 1, keys.shape[2]), mx.bool_)
            masks.append(mask.swapaxes(-1, -2))
        tail = self.step.tail_mask(self.layer_cache, window).swapaxes(-1, -2)
        return self._joined(masks, tail).swapaxes(-1, -2)

    def positions(self) -> mx.array:
        """Of each column of joined KV, int32 [width, columns]; -1 where it is no token's."""
        mains = []
        for keys_and_values, cohort in zip(self._mains, self.step.tree["cohorts"], strict=True):
            column = mx.arange(keys_and_values[0].shape[2])[None]
            stored = cohort["stored"][self._window_class][:, None]
            first = cohort["lengths"][:, None] - stored
            place = mx.where(column < stored, first + column + 1, 0)
            mains.append(place[:, None, :, None])
        place = self.offset[:, None] - self.step.tail_ages() + 2
        tail = mx.where(self.step.tree["written"], place, 0)[:, None, :, None]
        return self._joined(mains, tail)[:, 0, :, 0] - 1  # 0 was no token's: padding is zeros

    @property
    def _window_class(self) -> int:
        return self.step.layout.window_classes.index(self.layer_cache.window)

    def _joined(self, mains: list[mx.array], tail: mx.array) -> mx.array:
        """[width, heads, columns of the longest main and of the tail, dim]"""
        if not mains:
            return tail
        if self.step.aligned:
            return mx.concatenate([mains[0], tail], axis=2)
        longest = max(main.shape[2] for main in mains)
        in_order = self._in_row_order([_pad(main, longest) for main in mains])
        return mx.concatenate([in_order, tail], axis=2)


def _pad(array: mx.array, columns: int) -> mx.array:
    missing = columns - array.shape[2]
    return array if missing == 0 else mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)])
