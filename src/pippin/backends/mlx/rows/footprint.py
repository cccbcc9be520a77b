"""What a running request occupies at most, told before it runs. Knows layers, not rows or steps."""

from __future__ import annotations

from pippin.backends.mlx.layout import Layout, Leaf
from pippin.backends.mlx.rows.arrays import TAIL
from pippin.backends.mlx.rows.cohorts import num_columns

IN_FLIGHT = 2  # copies of what each step writes anew: one that is read, one that is written
MOVING_SHARE = 0.3  # of a main: its part of the copies while tails move into new mains


def row_bytes(layout: Layout, num_tokens: int) -> int:
    """Its main, padded; its tail; its recurrent states."""
    return sum(_leaf_bytes(leaf, num_tokens) for leaf in layout.leaves)


def _leaf_bytes(leaf: Leaf, num_tokens: int) -> int:
    if leaf.is_state:
        return IN_FLIGHT * leaf.nbytes
    kept = num_tokens if leaf.window is None else min(num_tokens, leaf.window)
    main = num_columns(kept) * leaf.nbytes
    return main + int(MOVING_SHARE * main) + IN_FLIGHT * TAIL * leaf.nbytes
