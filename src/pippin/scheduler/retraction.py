"""What to do when running replies outgrow the budget: whom to take back, and who is too large.

A request that is retracted waits in the queue again and runs what it knows a second time, less what
the tree holds by then. The senior one (the highest priority, then the earliest arrival) is never
chosen: so somebody always goes on to the end, then the next one, and all of them finish. Knows no
plans.
"""

from __future__ import annotations

from collections.abc import Sequence

from pippin.backends.base import Costs
from pippin.errors import OutOfMemory
from pippin.scheduler.budget import ByteBudget
from pippin.scheduler.claims import Claims
from pippin.scheduler.holding import Holding
from pippin.scheduler.registry import Registry
from pippin.scheduler.request import Request
from pippin.scheduler.traffic.base import Traffic
from pippin.types import GRID


class Retraction:
    def __init__(
        self,
        costs: Costs,
        budget: ByteBudget,
        claims: Claims,
        traffic: Traffic,
        registry: Registry,
    ) -> None:
        self._costs = costs
        self._budget = budget
        self._claims = claims
        self._traffic = traffic
        self._registry = registry

    def make_room(self, starved: Sequence[Holding], *, in_flight: bool) -> None:
        """Give up checkpoints and loads, then retract somebody.

        Whoever starves goes on in a later plan. Where nothing can be given up and nothing is on
        its way back (no step is `in_flight`), one request is larger than all there is.
        """
        holdings = self._registry.holdings
        shortage = self._claims.shortage(starved, holdings.values())
        if shortage > 0 and self._traffic.give_up_loads():
            shortage = self._claims.shortage(starved, holdings.values())
        if shortage <= 0:
            return
        for holding in choose(self._registry.running, shortage):
            self._registry.retract(holding)
        if len(holdings) == 1 and not in_flight:
            self._start_over(starved[0])

    def fail_hopeless(self, request: Request) -> None:
        """Nothing runs, and yet it cannot start: it had outgrown the whole budget."""
        need = self._costs.row_bytes(request.num_tokens + 1)
        message = (
            f"the request grew to {request.num_tokens:,} tokens and needs {need:,} bytes, "
            f"the budget holds {self._budget.capacity:,}"
        )
        self._registry.fail(request, OutOfMemory(message))

    def _start_over(self, holding: Holding) -> None:
        """Alone, and out of bytes. What it borrowed from the tree comes with a state and more that
        a row of its own does without: then it begins again; or else it is too large."""
        fits = self._costs.row_bytes(holding.held + 1) <= self._budget.capacity
        if holding.lock is None or not fits:
            self._fail_too_large(holding)
        elif not holding.retracting:
            self._registry.retract(holding)

    def _fail_too_large(self, holding: Holding) -> None:
        need, capacity = self._claims.row_bytes(holding, holding.held + 1), self._budget.capacity
        message = (
            f"the reply reached {holding.held:,} tokens and needs {need:,} bytes, "
            f"the budget holds {capacity:,}"
        )
        self._registry.fail(holding.request, OutOfMemory(message))


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
    return holding.priority, (holding.held - holding.in_tree) // GRID, -request.arrival


def _freed(holding: Holding) -> int:
    return holding.nbytes + holding.checkpoint_bytes
