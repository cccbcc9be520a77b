"""What a layer sees of rows that lie in a KV table, for CPUs that attend to it in one operation.

A step's graph is the same for any rows: it is compiled once for each number of rows.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from pippin.backends.mlx.attention.row_kv import RowKV
from pippin.backends.mlx.cpu.operations import operations
from pippin.backends.mlx.layout import Layout


def reads_table(layout: Layout) -> bool:
    """Whether there is the operation, and it takes what layers keep."""
    return layout.fits_table and operations() is not None


class TableRowKV(RowKV):
    """Keys and values of the step go into the tail where attention is computed."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._handed_out(keys, values)

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        assert self._new is not None
        keys, values = self._new
        given = [*self.tail, keys.astype(mx.float32), values.astype(mx.float32)]
        given += [self.step.tree["cursor"], queries.astype(mx.float32), self.step.tree["kv_table"]]
        given += [] if sinks is None else [sinks.astype(mx.float32)]
        out: mx.array
        *self.tail, out = operations().row_attention(given, scale, self._place, mask.window or 0)
        return out.astype(queries.dtype)
