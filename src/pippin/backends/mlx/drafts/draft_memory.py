"""The bytes that drafts take of a row, and how many a row can afford. Knows no steps."""

from __future__ import annotations

from pippin.backends.draft_limits import affordable_depth
from pippin.backends.mlx.drafts.draft_rows import find_draft_layers
from pippin.backends.mlx.load import LoadedModel
from pippin.backends.mlx.rows.memory import Footprint


def draft_bytes(loaded: LoadedModel, max_depth: int) -> int:
    """Of a row that may have so many."""
    without, own = (Footprint(loaded.layout, depth).line_bytes for depth in (0, max_depth))
    head = loaded.mtp_head
    return own - without + (0 if head is None else head.ring_shape(max_depth).nbytes)


def depth_within(loaded: LoadedModel, max_depth: int, *, deterministic: bool) -> int:
    with loaded.operating():
        layers = find_draft_layers(loaded.model, loaded.layout, deterministic=deterministic)
    if isinstance(layers, str):  # then rows verify none, and say why
        return max_depth
    row_bytes = Footprint(loaded.layout).row_bytes
    return affordable_depth(max_depth, lambda depth: draft_bytes(loaded, depth), row_bytes)
