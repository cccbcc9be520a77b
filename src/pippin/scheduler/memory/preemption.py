"""Which requests to preempt when running replies outgrow the budget, and which are too large.

A preempted request is queued again and runs its known tokens a second time, less what the tree
holds by then. The senior one (the highest priority, then the earliest arrival) is never preempted:
so one always runs to its end, then the next one, and all of them finish. Knows no plans.
"""

from __future__ import annotations

from collections.abc import Sequence

from pippin.errors import OutOfMemory
from pippin.scheduler.memory.claims import Claims
from pippin.scheduler.registry import Registry
from pippin.scheduler.request import Request
from pippin.scheduler.running_slot import RunningSlot
from pippin.scheduler.traffic.traffic import Traffic
from pippin.types import GRID


class Preemption:
    def __init__(self, claims: Claims, traffic: Traffic, registry: Registry) -> None:
        self._costs = claims.costs
        self._budget = claims.budget
        self._claims = claims
        self._traffic = traffic
        self._registry = registry

    def make_room(self, starved: Sequence[RunningSlot], *, in_flight: bool) -> None:
        """Give up checkpoints, loads and hand-overs, then preempt requests.

        Those starved go on in a later plan. Where nothing can be given up and no step is
        `in_flight` that releases bytes, one request is larger than the budget.
        """
        running_slots = self._registry.running_slots
        shortage = self._claims.shortage(starved, running_slots.values())
        if shortage > 0 and self._traffic.give_up_loads():
            shortage = self._claims.shortage(starved, running_slots.values())
        if shortage > 0 and self._traffic.give_up_handovers(shortage):
            shortage = self._claims.shortage(starved, running_slots.values())
        if shortage <= 0:
            return
        for running in requests_to_preempt(self._registry.running, shortage):
            self._registry.preempt(running)
        if len(running_slots) == 1 and not in_flight:
            self._start_over(starved[0])

    def fail_hopeless(self, request: Request) -> None:
        """Nothing runs, and yet it cannot start: it had outgrown the whole budget."""
        self._fail(request, request.num_tokens, self._costs.row_bytes(request.num_tokens + 1))

    def _start_over(self, running: RunningSlot) -> None:
        """Alone, and out of bytes. What it borrowed from the tree comes with a state and more that
        a row of its own does without: then it is preempted; or else it is too large."""
        fits = self._costs.row_bytes(running.row_len + 1) <= self._budget.capacity
        if running.lock is None or not fits:
            need = self._claims.row_bytes(running, running.row_len + 1)
            self._fail(running.request, running.row_len, need)
        elif not running.preempting:
            self._registry.preempt(running)

    def _fail(self, request: Request, num_tokens: int, need: int) -> None:
        message = (
            f"the request reached {num_tokens:,} tokens and needs {need:,} bytes, "
            f"the budget holds {self._budget.capacity:,}"
        )
        self._registry.fail(request, OutOfMemory(message))


def requests_to_preempt(candidates: Sequence[RunningSlot], nbytes: int) -> list[RunningSlot]:
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
