"""A step that was handed to the backend, and the record that it leaves. Knows no clock."""

from __future__ import annotations

from dataclasses import dataclass

from pippin.backends.base import PendingStep, StepPlan, StepResult
from pippin.metrics import NOTICEABLE_SECONDS, StepRecord


@dataclass(frozen=True)
class Launched:
    plan: StepPlan
    pending: PendingStep
    planned_at: float
    launched_at: float
    after_pause: bool  # the engine had nothing to do before it

    def record(
        self,
        result: StepResult,
        *,
        waited: float,
        resumed: float,
        committed: float,
        ghosts: int,
    ) -> StepRecord:
        # A host that did not wait was late: the device may have been done as early as the end of
        # the launch. So idle time is never counted too small.
        done = resumed if waited > NOTICEABLE_SECONDS else self.launched_at
        return StepRecord(
            step=self.plan.step,
            planned=self.planned_at,
            dispatched=result.dispatched,
            launched=self.launched_at,
            device_done=done,
            resumed=resumed,
            committed=committed,
            waited=waited,
            prefill_tokens=self.plan.num_prefill_tokens,
            decode_rows=len(self.plan.decode),
            ghosts=ghosts,
            device=result.device,
            forwards=result.forwards,
            after_pause=self.after_pause,
            drafts=self.plan.num_drafts,
            accepted=result.num_accepted,
            own_drafts=sum([row.depth for row in self.plan.decode if row.drafted]),
            drafts_left=self.plan.num_drafts_left,
            verified=tuple(
                (row.slot, row.depth, len(result.tokens[row.slot]) - 1)
                for row in self.plan.decode
                if row.depth
            ),
        )
