"""What a layer sees of rows whose segments a kernel reads in one step: its cache view."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from pippin.backends.mlx.attention.decode_step import DecodeStep
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
        return self._by_kernel(queries, scale, sinks)

    def _by_kernel(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        shape = self.step.shape.mains
        assert shape is not None
        assert shape.paths.kernel is not None
        call = self._call(queries, scale, sinks, shape.longest[self._class])
        out, *self.tail = shape.paths.kernel(call)
        return out

    def _call(
        self, queries: mx.array, scale: float, sinks: mx.array | None, num_columns: int
    ) -> PackedCall:
        assert self._new is not None
        ropes = self.step.ropes
        return PackedCall(
            queries,
            *self._new,
            (self.tail[0], self.tail[1]),
            self._segments,
            *self.step.packed(self._class),
            self.step.tree["cursor"],
            scale,
            sinks,
            num_columns,
            self.offset,
            None if ropes is None else ropes.of(queries, self._new[0]),
        )
