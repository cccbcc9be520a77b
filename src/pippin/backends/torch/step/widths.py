"""How many rows a decode step has room for: a few numbers, so that few graphs are captured."""

from __future__ import annotations

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def width_for(num_rows: int) -> int:
    return next((width for width in WIDTHS if width >= num_rows), -(-num_rows // 64) * 64)
