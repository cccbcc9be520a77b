"""What a layer sees of rows whose segments a kernel reads in one step: its cache view."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from pippin.backends.mlx.attention.decode_step import DecodeStep
from pippin.backends.mlx.attention.head_ropes import Rope, what_is_left
from pippin.backends.mlx.attention.paths import PackedCall
from pippin.backends.mlx.attention.row_kv import RowKV
from pippin.backends.mlx.layout import LayerCache


class PackedRowKV(RowKV):
    """Keys and values of the step go into the tail where attention is computed."""

    def __init__(self, step: DecodeStep, cache: LayerCache, place: int) -> None:
        super().__init__(step, cache, place)
        self._segments = [(keys, values) for keys, values in step.tree["mains"][place]]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._handed_out(keys, values)

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        assert mask.window == self.layer_cache.window, "a kernel sees what its layer keeps"
        assert self._new is not None
        q, k, ropes = what_is_left(queries, self._new[0])
        return self._by_kernel(q, k, self._new[1], scale, sinks, ropes)

    def _by_kernel(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        scale: float,
        sinks: mx.array | None,
        ropes: tuple[Rope, Rope] | None,
        rotated: mx.array | None = None,
    ) -> mx.array:
        shape = self.step.shape.mains
        assert shape is not None
        assert shape.paths.kernel is not None
        call = PackedCall(
            q,
            k,
            v,
            (self.tail[0], self.tail[1]),
            self._segments,
            *self.step.packed(self._class),
            self.step.tree["cursor"],
            scale,
            sinks,
            shape.longest[self._class],
            self.offset,
            ropes,
            rotated,
        )
        out, *self.tail = shape.paths.kernel(call)
        return out
