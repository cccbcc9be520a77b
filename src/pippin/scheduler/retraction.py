"""Whom to take back when running replies outgrow the budget. Knows no queue and no steps.

A request that is retracted waits in the queue again and runs what it knows a second time, less what
the tree holds by then. The senior one (the highest priority, then the earliest arrival) is never
chosen: so somebody always goes on to the end, then the next one, and all of them finish.
"""

from __future__ import annotations

from collections.abc import Sequence

from pippin.scheduler.holding import Holding
from pippin.types import GRID


def choose(running: Sequence[Holding], nbytes: int) -> list[Holding]:
    """The least that gives `nbytes` back, cheapest first; all but the senior one if that is less.

    Those that are being retracted already count, and are not named again.
    """
    if not running:
        return []
    senior = min(running, key=lambda holding: holding.request.rank)
    chosen: list[Holding] = []
    freed = sum(_freed(holding) for holding in running if holding.retracting)
    for holding in sorted(running, key=_cost):
        if freed >= nbytes:
            break
        if holding is not senior and not holding.retracting:
            chosen.append(holding)
            freed += _freed(holding)
    return chosen


def _cost(holding: Holding) -> tuple[int, int, int]:
    """Low priority first; then the fewest blocks to run again; then the youngest."""
    request = holding.request
    return request.priority, (holding.held - holding.in_tree) // GRID, -request.arrival


def _freed(holding: Holding) -> int:
    return holding.nbytes + holding.checkpoint_bytes
