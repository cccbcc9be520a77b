"""What an observer of the scheduler is called with. Knows no observer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pippin.backends.base import StepPlan
from pippin.metrics import StepRecord
from pippin.scheduler.request import Request
from pippin.scheduler.running_slot import RunningSlot


class Observer(Protocol):
    """Called from the loop's thread, while the device works where that can be so. Never raises."""

    def request_changed(self, request: Request) -> None:
        """It arrived, or is in another phase."""
        ...

    def step_launched(self, plan: StepPlan, running_slots: Mapping[int, RunningSlot]) -> None:
        """`running_slots`: by slot, as of now."""
        ...

    def step_committed(self, plan: StepPlan, record: StepRecord) -> None: ...
