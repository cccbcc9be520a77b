"""What to do when running replies outgrow the budget: whom to take back, and who is too large.

A request that is preempted waits in the queue again and runs what it knows a second time, less what
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
from pippin.scheduler.registry import Registry
from pippin.scheduler.request import Request
from pippin.scheduler.running_slot import RunningSlot
from pippin.scheduler.traffic.traffic import Traffic
from pippin.types import GRID


class Preemption:
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

    def make_room(self, starved: Sequence[RunningSlot], *, in_flight: bool) -> None:
        """Give up checkpoints and loads, then preempt somebody.

        Whoever starves goes on in a later plan. Where nothing can be given up and nothing is on
        its way back (no step is `in_flight`), one request is larger than all there is.
        """
        running_slots = self._registry.running_slots
        shortage = self._claims.shortage(starved, running_slots.values())
        if shortage > 0 and self._traffic.give_up_loads():
            shortage = self._claims.shortage(starved, running_slots.values())
        if shortage <= 0:
            return
        for running in choose(self._registry.running, shortage):
            self._registry.preempt(running)
        if len(running_slots) == 1 and not in_flight:
            self._start_over(starved[0])

    def fail_hopeless(self, request: Request) -> None:
        """Nothing runs, and yet it cannot start: it had outgrown the whole budget."""
        need = self._costs.row_bytes(request.num_tokens + 1)
        message = (
            f"the request grew to {request.num_tokens:,} tokens and needs {need:,} bytes, "
            f"the budget holds {self._budget.capacity:,}"
        )
        self._registry.fail(request, OutOfMemory(message))

    def _start_over(self, running: RunningSlot) -> None:
        """Alone, and out of bytes. What it borrowed from the tree comes with a state and more that
        a row of its own does without: then it begins again; or else it is too large."""
        fits = self._costs.row_bytes(running.row_len + 1) <= self._budget.capacity
        if running.lock is None or not fits:
            self._fail_too_large(running)
        elif not running.preempting:
            self._registry.preempt(running)

    def _fail_too_large(self, running: RunningSlot) -> None:
        need, capacity = self._claims.row_bytes(running, running.row_len + 1), self._budget.capacity
        message = (
            f"the reply reached {running.row_len:,} tokens and needs {need:,} bytes, "
            f"the budget holds {capacity:,}"
        )
        self._registry.fail(running.request, OutOfMemory(message))


def choose(candidates: Sequence[RunningSlot], nbytes: int) -> list[RunningSlot]:
    """The least that gives `nbytes` back, cheapest first; all but the senior one if that is less.

    Those that are being preempted already count, and are not named again.
    """
    if not candidates:
        return []
    senior = min(candidates, key=lambda running: running.request.rank)
    chosen: list[RunningSlot] = []
    freed = sum(_freed(running) for running in candidates if running.preempting)
    for running in sorted(candidates, key=_cost):
        if freed >= nbytes:
            break
        if running is not senior and not running.preempting:
            chosen.append(running)
            freed += _freed(running)
    return chosen


def _cost(running: RunningSlot) -> tuple[int, int, int]:
    """Low priority first; then the fewest blocks to run again; then the youngest."""
    request = running.request
    return running.priority, (running.row_len - running.in_tree) // GRID, -request.arrival


def _freed(running: RunningSlot) -> int:
    return running.nbytes + running.checkpoint_bytes
