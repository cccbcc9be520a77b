"""Which decode rows form a cohort: rows of like length, and rows that begin with the same tokens.

Knows lengths and prompts, not what rows hold. Costs are counted in tokens of KV that a step reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pippin.backends.mlx.attention.split_attention import SHARED_BLOCK

GROUP_COST_TOKENS = 256  # one more group costs a step about as much as this many padded tokens
SHARE_COST_TOKENS = 1024  # likewise a shared piece, which has products and a softmax of its own
SPLIT_COST_TOKENS = 12 * 1024  # likewise the second group: a step of one group can be compiled
DISCOUNTS = (1.0, 0.25, 1 / 16, 0.0)  # of these costs, where memory allows little padding
MIN_SHARED_BLOCKS = 2  # one alone would need kernels of its own
DEPTHS = (256, 1024)  # how many tokens rows must begin alike with to be set apart


@dataclass(frozen=True)
class Group:
    """Rows for one cohort."""

    indices: list[int]  # -1: a line that only pads the cohort
    num_shared: int = 0  # tokens that all of them begin with, to be held once

    @property
    def num_saved(self) -> int:
        """Tokens that need not be held."""
        return (len(self.indices) - 1) * self.num_shared


def group_rows(
    lengths: Mapping[int, int],
    prompts: Mapping[int, np.ndarray],
    max_padding: float = math.inf,  # tokens
    *,
    one_pays: bool = True,
) -> list[Group]:
    """The cheapest of a few partitions: by length alone, or first by what rows begin with.

    Rows without a prompt here share nothing. The less padding there may be, the less it counts
    that groups cost something. `one_pays`: steps of a single group are cheaper than others.
    """
    split_cost = SPLIT_COST_TOKENS if one_pays else 0
    groups: list[Group] = []
    for discount in DISCOUNTS:
        groups = _cheapest(lengths, prompts, discount, discount * split_cost)
        if sum(_padding(group, lengths) for group in groups) <= max_padding:
            break
    return groups


def _cheapest(
    lengths: Mapping[int, int],
    prompts: Mapping[int, np.ndarray],
    discount: float,
    split_cost: float,
) -> list[Group]:
    partitions = (
        [
            Group(run, _num_shared(run, lengths, prompts))
            for family in families
            for run in group_by_length({i: lengths[i] for i in family}, discount)
        ]
        for families in _partitions(lengths, prompts)
    )

    def cost(groups: list[Group]) -> float:
        total = sum(_cost(group, lengths, discount) for group in groups)
        return total + (split_cost if len(groups) > 1 else 0)

    return min(partitions, key=cost)


def group_by_length(lengths: Mapping[int, int], discount: float = 1.0) -> list[list[int]]:
    """Partition rows so that padding plus the cost of having groups is least.

    Rows are sorted by length, so groups are runs; the best partition of the first j rows ends in a
    run i..j for the cheapest i.
    """
    order = sorted(lengths, key=lambda index: lengths[index])
    sizes = [lengths[index] for index in order]
    group_cost = discount * GROUP_COST_TOKENS
    best: list[tuple[float, int]] = [(0.0, 0)]
    for j in range(1, len(order) + 1):
        best.append(min((best[i][0] + (j - i) * sizes[j - 1] + group_cost, i) for i in range(j)))
    groups: list[list[int]] = []
    j = len(order)
    while j > 0:
        i = best[j][1]
        groups.append(sorted(order[i:j]))
        j = i
    return groups[::-1]


def common_len(prompts: Sequence[np.ndarray]) -> int:
    """How many tokens all of them begin with."""
    first, *others = prompts
    common = len(first)
    for other in others:
        common = min(common, len(other))
        differs = first[:common] != other[:common]
        if differs.any():
            common = int(differs.argmax())
    return common


def _partitions(
    rows: Mapping[int, int], prompts: Mapping[int, np.ndarray]
) -> Iterator[list[list[int]]]:
    """All rows together; then families that begin alike, and the other rows."""
    yield [list(rows)]
    for depth in DEPTHS:
        families: dict[bytes, list[int]] = {}
        for index in rows:
            if index in prompts and len(prompts[index]) >= depth:
                families.setdefault(prompts[index][:depth].tobytes(), []).append(index)
        alike = [family for family in families.values() if len(family) > 1]
        rest = set(rows).difference(*alike)
        if alike and (rest or len(alike) > 1):
            yield [*alike, sorted(rest)] if rest else alike


def _num_shared(
    rows: Sequence[int], lengths: Mapping[int, int], prompts: Mapping[int, np.ndarray]
) -> int:
    """Whole blocks, and never all of a row: it keeps a column of its own."""
    if len(rows) < 2 or any(index not in prompts for index in rows):
        return 0
    common = min(common_len([prompts[i] for i in rows]), min(lengths[i] for i in rows) - 1)
    num_blocks = common // SHARED_BLOCK
    saved = (len(rows) - 1) * num_blocks * SHARED_BLOCK
    pays = saved > SHARE_COST_TOKENS and num_blocks >= MIN_SHARED_BLOCKS
    return num_blocks * SHARED_BLOCK if pays else 0


def _padding(group: Group, lengths: Mapping[int, int]) -> int:
    longest = max(lengths[index] for index in group.indices)
    return sum(longest - lengths[index] for index in group.indices)


def _cost(group: Group, lengths: Mapping[int, int], discount: float) -> float:
    rows = group.indices
    cost = len(rows) * max(lengths[index] for index in rows) + discount * GROUP_COST_TOKENS
    if group.num_shared:
        cost += SHARE_COST_TOKENS - group.num_saved
    return cost
