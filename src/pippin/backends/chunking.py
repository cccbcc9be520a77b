"""Which chunks of a plan share a forward. Padding costs compute, a forward costs overhead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from pippin.backends.base import PrefillRow
from pippin.types import GRID

# Padding that costs about as much as one more forward. On a CPU a token costs far more than
# launching operations; on GPUs a forward's overhead buys many tokens.
FORWARD_COST_TOKENS = {True: 8, False: 256}  # by whether the device is a CPU


def grid_blocks(chunk: PrefillRow) -> list[PrefillRow]:
    """The chunk, cut at every multiple of GRID: the same blocks whatever else is running."""
    return cut_chunk(chunk, range(chunk.start - chunk.start % GRID + GRID, chunk.end, GRID))


def cut_chunk(chunk: PrefillRow, cuts: Iterable[int]) -> list[PrefillRow]:
    """The chunk in parts, cut at these ascending positions inside it."""
    parts = []
    start = chunk.start
    for end in (*cuts, chunk.end):
        parts.append(
            replace(
                chunk,
                start=start,
                tokens=chunk.tokens[start - chunk.start : end - chunk.start],
                samples=chunk.samples and end == chunk.end,
                restore=chunk.restore if start == chunk.start else None,
                checkpoints=tuple(at for at in chunk.checkpoints if start < at <= end),
            )
        )
        start = end
    return parts


def group_chunks(
    chunks: Sequence[PrefillRow],
    alone: Callable[[PrefillRow], bool],
    *,
    pads: bool = True,
    cpu: bool = True,
) -> list[list[PrefillRow]]:
    """Chunks of like lengths together; those that must be `alone` by themselves.

    Without `pads`, the model would take padding for tokens: only equal lengths go together.
    """
    forward_cost_tokens = FORWARD_COST_TOKENS[cpu] if pads else 0
    groups = [[chunk] for chunk in chunks if alone(chunk)]
    rest = sorted((c for c in chunks if not alone(c)), key=lambda c: len(c.tokens), reverse=True)
    group: list[PrefillRow] = []
    padding = 0
    for chunk in rest:
        extra = len(group[0].tokens) - len(chunk.tokens) if group else 0
        if group and padding + extra > forward_cost_tokens * len(group):
            groups.append(group)
            group, padding, extra = [], 0, 0
        group.append(chunk)
        padding += extra
    if group:
        groups.append(group)
    return groups
