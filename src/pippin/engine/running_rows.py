"""How many requests run at the same time, where `--max-running` is auto. Knows no arrays.

Before a load: as many as pay on such a device; on CUDA, where each row takes buffers for sampling
and graphs, within its budget. After it: as many as fit into what the weights have left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pippin.amounts import show_bytes
from pippin.config import EngineConfig

# Steps of more rows generate more tokens in all up to about these.
MOST_ON_CUDA, MOST_ELSEWHERE = 256, 64
MOST_WITH_DRAFT_MODEL = 32  # each row has keys of that model too, and drafts pay where rows are few
LEAST = 8
MULTIPLE = 8
BUDGET_BYTES_PER_ROW = 64 << 20
TYPICAL_TOKENS = 1024  # of a request: longer ones are preempted where too many are


@dataclass(frozen=True)
class RunningRows:
    number: int
    reason: str


def rows_to_load(config: EngineConfig, kind: str, budget_bytes: int) -> RunningRows:
    """What a backend on a device of this kind has room for in its buffers."""
    if config.max_running != "auto":
        return RunningRows(config.max_running, "--max-running")
    if config.draft_model is not None:
        return RunningRows(MOST_WITH_DRAFT_MODEL, "auto: the most with a draft model")
    if kind != "cuda":
        return RunningRows(MOST_ELSEWHERE, f"auto: the most for {kind}")
    within = _rounded(budget_bytes // BUDGET_BYTES_PER_ROW)
    if within >= MOST_ON_CUDA:
        return RunningRows(MOST_ON_CUDA, "auto: the most for cuda")
    per_row = show_bytes(BUDGET_BYTES_PER_ROW)
    return RunningRows(within, f"auto: {per_row} a row of a budget of {show_bytes(budget_bytes)}")


def rows_that_fit(
    config: EngineConfig, loaded: RunningRows, capacity_bytes: int, row_bytes: Callable[[int], int]
) -> RunningRows:
    """`capacity_bytes`: for requests; `row_bytes`: of one with so many tokens."""
    fit = _rounded(capacity_bytes // max(1, row_bytes(TYPICAL_TOKENS)))
    if config.max_running != "auto" or fit >= loaded.number:
        return loaded
    return RunningRows(
        fit,
        f"auto: {show_bytes(capacity_bytes)} for requests hold {fit} of {TYPICAL_TOKENS:,} tokens",
    )


def _rounded(rows: int) -> int:
    return max(LEAST, rows // MULTIPLE * MULTIPLE)
