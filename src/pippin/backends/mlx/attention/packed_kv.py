"""What a model sees of packed mains in one step: the cache view of one attention layer."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from pippin.backends.mlx.attention.decode_step import DecodeStep, MainsShape
from pippin.backends.mlx.attention.paths import AttentionPaths, PackedCall, Path
from pippin.backends.mlx.attention.plain_attention import attend_joined
from pippin.backends.mlx.attention.row_kv import RowKV
from pippin.backends.mlx.layout import LayerCache


@dataclass(frozen=True)
class PackedShape(MainsShape):
    columns: tuple[tuple[int, ...], ...]  # by window class of the layout, by segment
    longest: tuple[int, ...]  # by window class: no row has more columns
    paths: AttentionPaths


class PackedRowKV(RowKV):
    """Keys and values of the step go into the tail where attention is computed."""

    def __init__(self, step: DecodeStep, cache: LayerCache, place: int) -> None:
        super().__init__(step, cache, place)
        self._segments = [(keys, values) for keys, values in step.tree["mains"][place]]
        self._class = step.layout.window_classes.index(cache.window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._handed_out(keys, values)

    def attend(
        self, queries: mx.array, scale: float, window: int | None, sinks: mx.array | None
    ) -> mx.array:
        assert window == self.layer_cache.window, "packed rows see what their layer keeps"
        shape = self.step.shape.mains
        assert isinstance(shape, PackedShape)
        call = self._call(queries, scale, sinks, shape.longest[self._class])
        kernel = shape.paths.kernel
        if kernel is None or shape.paths.of_packed(call) is Path.JOINED:
            out, *self.tail = attend_joined(call)
        else:
            out, *self.tail = kernel(call)
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
