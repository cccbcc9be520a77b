"""What a step computes of replies: one token each, and what is kept of those that end.

Knows no prompts and no queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pippin.backends.base import DecodeRow, Retire
from pippin.cache.policy import CheckpointPolicy
from pippin.scheduler.claims import Claims
from pippin.scheduler.holding import Holding
from pippin.types import GRID


@dataclass(frozen=True)
class ReplyPlanner:
    claims: Claims
    policy: CheckpointPolicy | None  # None: replies are not cached
    has_states: bool  # the model is recurrent: a growing reply leaves checkpoints

    def plan(
        self, step: int, holdings: Iterable[Holding]
    ) -> tuple[tuple[DecodeRow, ...], list[Holding]]:
        """A row for each reply that goes on, and those that have no bytes to grow into."""
        rows: list[DecodeRow] = []
        starved: list[Holding] = []
        for holding in holdings:
            request = holding.request
            samples = request.phase == "decode" and request.samples_left and not holding.retracting
            if not samples and not self.runs_last_token(holding):
                continue
            end = holding.held + 1
            if end > holding.row_tokens and not self.claims.grow(holding, end):
                if samples:
                    starved.append(holding)
                else:
                    holding.keeps_last = False
                continue
            holding.plan_token(step, samples=samples)
            checkpoint = end % GRID == 0 and self._keeps_checkpoint(step, holding, end)
            masked = request.grammar is not None
            rows.append(DecodeRow(holding.slot, end - 1, samples, checkpoint, masked))
        return tuple(rows), starved

    def runs_last_token(self, holding: Holding) -> bool:
        """Whether a reply's last token is still to be run, so that the tree gets all of it.

        Once every sample is planned, the next step can do so before that token is known.
        """
        if self.policy is None or not holding.keeps_last or holding.num_left > 0:
            return False
        if holding.retracting or holding.retired:
            return False
        request = holding.request
        if request.phase == "decode":
            return not request.samples_left and holding.held < request.max_total
        return request.completed and not holding.tainted and holding.held < request.num_tokens

    def retire(self, step: int, holding: Holding) -> Retire:
        """The row's end; the tree gets what it holds of a reply that ended or is to be resumed."""
        kept = holding.request.completed or holding.runs
        captures = self.policy is not None and kept and holding.is_exact
        row = self.claims.fit_retire(step, holding, captures=captures)
        holding.retire(row.end)
        return row

    def _keeps_checkpoint(self, step: int, holding: Holding, position: int) -> bool:
        """Whether the state after `position` tokens of a reply is worth keeping, and fits."""
        if self.policy is None or not self.has_states or not self.policy.captures_decode(position):
            return False
        return self.claims.fit_checkpoint(step, holding, position)
