"""What a layer sees of rows that lie in a KV table, for CPUs that attend to it in one operation.

A step's graph is the same for any rows: it is compiled once for each number of rows.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from pippin.backends.mlx.attention.row_kv import RowKV
from pippin.backends.mlx.cpu.operations.bindings import Operations, operations
from pippin.backends.mlx.layout import Layout


def table_operations(layout: Layout) -> Operations | None:
    """None where the operation does not take what layers keep, or there is none."""
    return operations("row_attention") if layout.fits_table else None


class TableRowKV(RowKV):
    """Keys and values of the step go into the tail where attention is computed."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._handed_out(keys, values)

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        ours = operations("row_attention")
        assert ours is not None, "only our own operations read a KV table"
        assert self._new is not None
        keys, values = self._new
        *self.tail, out = ours.row_attention(
            queries.astype(mx.float32),
            (self.tail[0], self.tail[1]),
            (keys.astype(mx.float32), values.astype(mx.float32)),
            self.step.tree["cursor"],
            self.step.tree["kv_table"],
            scale,
            place=self._place,
            window=mask.window,
            sinks=None if sinks is None else sinks.astype(mx.float32),
        )
        return out.astype(queries.dtype)
