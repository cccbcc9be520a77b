"""What a layer sees of rows that lie in a KV table, for CPUs that attend to it in one operation.

A step's graph is the same for any rows: it is compiled once for each number of rows.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from pippin.backends.mlx.attention.row_kv import RowKV
from pippin.backends.mlx.cpu.operations.bindings import Operations, operations
from pippin.backends.mlx.layout import Layout

# Rows have a KV table for all of these or for none.
TABLE_OPERATIONS = ("kv_table", "row_attention", "tail_write")


def table_operations(layout: Layout) -> Operations | None:
    """None where the operation does not take what layers keep, or there is none."""
    return operations(*TABLE_OPERATIONS) if layout.fits_table else None


class TableRowKV(RowKV):
    def _written(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        ours = _operations()
        columns = keys.astype(mx.float32), values.astype(mx.float32)
        return ours.tail_write((self.tail[0], self.tail[1]), columns, self.step.tree["cursor"])

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        out = _operations().row_attention(
            queries.astype(mx.float32),
            (self.tail[0], self.tail[1]),
            self.step.tree["written"],
            self.step.tree["kv_table"],
            scale,
            place=self._place,
            window=mask.window,
            sinks=None if sinks is None else sinks.astype(mx.float32),
        )
        return out.astype(queries.dtype)


def _operations() -> Operations:
    ours = operations(*TABLE_OPERATIONS)
    assert ours is not None, "only our own operations read a KV table"
    return ours
