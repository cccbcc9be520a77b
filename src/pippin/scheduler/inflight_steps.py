"""Steps that were planned and have not been committed, and the fence they are. Knows no device."""

from __future__ import annotations

from dataclasses import dataclass

from pippin.backends.base import StepPlan
from pippin.cache.prefix_cache import PrefixCache
from pippin.scheduler.running_slot import RunningSlot


@dataclass(frozen=True)
class InflightStep:
    """A plan and who had which slot then; slots may change hands before its commit."""

    plan: StepPlan
    owners: dict[int, RunningSlot]
    retired: dict[int, RunningSlot]
    transient_bytes: int  # claimed for its captures

    def unlock_prompts(self, cache: PrefixCache | None, *, by_reference: bool) -> None:
        """A row whose prompt is computed depends on the tree only if it reads the tree's own."""
        for row in self.plan.prefill:
            running = self.owners[row.slot]
            if row.samples and not running.released:
                running.unlock_tip(cache)
                if not by_reference:
                    running.unlock(cache)


class InflightSteps:
    def __init__(self) -> None:
        self._steps: dict[int, InflightStep] = {}
        self.next_step = 0
        self.committed = -1

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, step: int) -> InflightStep:
        return self._steps[step]

    @property
    def transient_bytes(self) -> int:
        return sum(inflight.transient_bytes for inflight in self._steps.values())

    def fences(self, running: RunningSlot) -> bool:
        """Whether a step with a row of it is still to be committed."""
        return running.last_step > self.committed

    def add(self, inflight: InflightStep) -> None:
        assert inflight.plan.step == self.next_step, "steps are planned in order"
        self._steps[self.next_step] = inflight
        self.next_step += 1

    def pop(self, step: int) -> InflightStep:
        """It has been committed, or has failed."""
        inflight = self._steps.pop(step)
        assert step == self.committed + 1, "steps are committed in order"
        self.committed = step
        return inflight
