"""What an attention layer sees of the decode rows in one step: its cache view.

This one is for plain operations, which cannot read rows where they lie: each row's columns are
gathered, padded to the longest row, in every step. Others attend without that (packed_kv.py,
table_kv.py). A layer that attends in its own way is given what was gathered, and a mask.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from pippin.backends.mlx.attention.decode_step import WITHOUT_ITS_MASK, DecodeStep, RowMask
from pippin.backends.mlx.attention.lent_kv import LentArray, lend
from pippin.backends.mlx.attention.plain_attention import gathered, with_columns
from pippin.backends.mlx.layout import LayerCache
from pippin.backends.mlx.payloads.packing import KV


class RowKV:
    """The cache view of one attention layer during a decode step."""

    def __init__(self, step: DecodeStep, cache: LayerCache, place: int) -> None:
        """`place`: of the cache among the KV caches."""
        self.layer_cache = cache
        self.step = step
        self.offset = step.tree["offset"]
        self.tail: list[mx.array] = list(step.tree["tails"][place])
        self._place = place
        self._class = step.layout.window_classes.index(cache.window)
        self._new: KV | None = None  # what the model was given, also for layers that borrow it

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = self.layer_cache.kept(keys, values)
        tail = self.tail[0], self.tail[1]
        self.tail = list(with_columns(tail, keys, values, self.step.tree["cursor"]))
        if self.layer_cache.splits:
            return self._handed_out(keys, values)
        self._new = self._joined(0), self._joined(1)
        self.keys, self.values = self._new  # mlx-lm's names: a model may read and replace them
        return self._new

    def keys_and_values(self) -> tuple[LentArray, LentArray]:
        assert self._new is not None, "no layer has written this cache yet"
        return lend(self._new, self.offset + 1)

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
        mask = self.step.mask(self.layer_cache, window)
        self.step.given.append(mask[:, None] if self.step.layout.groups_heads else mask)
        return self.step.given[-1]

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """`mask`: that some layer's view has made."""
        if isinstance(mask, RowMask):
            mask = self.step.mask(self.layer_cache, mask.window)
        elif not any(mask is given for given in self.step.given):
            raise TypeError(WITHOUT_ITS_MASK)
        if mask.ndim == 5:  # made for layers that group heads
            mask = mask[:, 0]
        keys, values = self._joined(0), self._joined(1)
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )

    def positions(self) -> mx.array:
        """Of each column of joined KV, int32 [width, columns]; -1 where it is no token's."""
        return self.step.columns(self._class)[1]

    def _joined(self, side: int) -> mx.array:
        """[width, heads, columns of the longest row and of the tail, dim]"""
        parts = [pair[side] for pair in self.step.tree["mains"][self._place]]
        if not parts:
            return self.tail[side]
        at, _ = self.step.columns(self._class)
        return mx.concatenate([gathered(parts, at), self.tail[side]], axis=2)
