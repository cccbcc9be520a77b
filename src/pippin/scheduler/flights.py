"""Steps that were planned and have not been committed, and the fence they are. Knows no device."""

from __future__ import annotations

from dataclasses import dataclass

from pippin.backends.base import StepPlan
from pippin.cache.prefix_cache import PrefixCache
from pippin.scheduler.holding import Holding


@dataclass(frozen=True)
class Flight:
    """A plan and who had which slot then; slots may change hands before its commit."""

    plan: StepPlan
    owners: dict[int, Holding]
    retired: dict[int, Holding]
    transient_bytes: int  # claimed for its captures

    def unlock_prompts(self, cache: PrefixCache | None, *, by_reference: bool) -> None:
        """A row whose prompt is computed depends on the tree only if it reads the tree's own."""
        for row in self.plan.prefill:
            holding = self.owners[row.slot]
            if row.samples and not holding.released:
                holding.unlock_tip(cache)
                if not by_reference:
                    holding.unlock(cache)


class Flights:
    def __init__(self) -> None:
        self._flights: dict[int, Flight] = {}
        self.next_step = 0
        self.committed = -1

    def __len__(self) -> int:
        return len(self._flights)

    def __getitem__(self, step: int) -> Flight:
        return self._flights[step]

    @property
    def transient_bytes(self) -> int:
        return sum(flight.transient_bytes for flight in self._flights.values())

    def fences(self, holding: Holding) -> bool:
        """Whether a step with a row of it is still to be committed."""
        return holding.last_step > self.committed

    def add(self, flight: Flight) -> None:
        assert flight.plan.step == self.next_step, "steps are planned in order"
        self._flights[self.next_step] = flight
        self.next_step += 1

    def settle(self, step: int) -> Flight:
        """It has been committed, or has failed."""
        flight = self._flights.pop(step)
        assert step == self.committed + 1, "steps are committed in order"
        self.committed = step
        return flight
