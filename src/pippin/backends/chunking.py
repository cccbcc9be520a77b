"""Which chunks of a plan share a forward. Padding costs compute, a forward costs overhead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from pippin.backends.base import PrefillRow
from pippin.types import GRID

# Padding that costs about as much as one more forward. On a CPU a token costs far more than
# launching operations; on GPUs a forward's overhead buys many tokens.
FORWARD_COST_TOKENS = {True: 8, False: 256}  # by whether the device is a CPU
# Columns that a shorter prefix is padded with: attention reads them, and nothing else. By the
# operations of models from 20M to 8B parameters a token costs more than a hundred.
COLUMNS_A_TOKEN = 64
SHORT_PREFIX = 512  # prefixes up to here are alike


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
    fits: Callable[[int, int], bool] = lambda rows, prefix: True,
    pads: bool = True,
    cpu: bool = True,
) -> list[list[PrefillRow]]:
    """Chunks of like lengths and prefixes together; those that must be `alone` by themselves.

    `fits`: whether so many rows may be padded to a prefix of this length. Without `pads`, the model
    would take padding for tokens: only equal lengths go together.
    """

    def like(chunk: PrefillRow) -> tuple[int, int]:
        prefix, length = max(chunk.start, SHORT_PREFIX).bit_length(), len(chunk.tokens)
        return (prefix, length) if pads else (length, prefix)

    groups = [[chunk] for chunk in chunks if alone(chunk)]
    group: list[PrefillRow] = []
    for chunk in sorted((c for c in chunks if not alone(c)), key=like, reverse=True):
        wider = [*group, chunk]
        tokens = _padding([len(one.tokens) for one in wider])
        columns = _padding([one.start for one in wider])
        cost = tokens + columns / COLUMNS_A_TOKEN
        together = cost <= FORWARD_COST_TOKENS[cpu] * len(group) and (pads or not tokens)
        if group and not (together and fits(len(wider), max(one.start for one in wider))):
            groups.append(group)
            group = []
        group.append(chunk)
    if group:
        groups.append(group)
    return groups


def _padding(lengths: Sequence[int]) -> int:
    """What it takes to make all as long as the longest."""
    return max(lengths) * len(lengths) - sum(lengths)
