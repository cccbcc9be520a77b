"""How many drafts a row of a reply verifies, and which. Knows no plans.

    reply:   [ known | in flight, drafts of that step | input token, drafts of this step ]
             0   num_tokens               row_len: at most, since drafts may be rejected

What the host proposes begins behind the known tokens: the drafts of a step are those behind what
the step before it accepts, which the device knows first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pippin.backends.base import MAX_STOP_IDS, Proposal
from pippin.scheduler.request import Request
from pippin.scheduler.running_slot import RunningSlot
from pippin.scheduler.speculation.drafter import Drafter


@dataclass(frozen=True)
class Draft:
    """What a row verifies, and what the device's drafter is to leave for its next step."""

    depth: int = 0
    proposal: Proposal | None = None
    num_drafts: int = 0


NO_DRAFT = Draft()


@dataclass
class Speculation:
    drafter: Drafter
    max_depth: int  # that the backend verifies
    choose_depth: Callable[[RunningSlot], int]  # what is wanted; it need not be possible

    def draft(self, rows: Sequence[RunningSlot]) -> dict[RunningSlot, Draft]:
        """For the next rows of replies, all of a step."""
        may = [running for running in rows if may_speculate(running.request)]
        self.drafter.prepare(running.request for running in may)
        return {running: self._draft(running) for running in may}

    def _draft(self, running: RunningSlot) -> Draft:
        request = running.request
        left = request.params.max_tokens - request.num_sampled - 1
        wanted = min(self.choose_depth(running), self.max_depth)
        if self.drafter.on_device:
            return Draft(max(0, min(running.num_drafts, left)), num_drafts=wanted)
        depth = min(wanted, left)
        return self._propose(running, depth) if depth > 0 else NO_DRAFT

    def first_drafts(self, running: RunningSlot) -> int:
        """That the device's drafter is to leave behind a prompt's first token."""
        if not self.drafter.on_device or not may_speculate(running.request):
            return 0
        return min(self.choose_depth(running), self.max_depth)

    def _propose(self, running: RunningSlot, depth: int) -> Draft:
        request = running.request
        start, input_at = request.num_tokens, running.row_len
        tokens = self.drafter.propose(request, input_at + 1 + depth - start).tokens
        depth = min(depth, start + len(tokens) - input_at - 1)
        return Draft(depth, Proposal(start, tokens)) if depth > 0 else NO_DRAFT


def may_speculate(request: Request) -> bool:
    """Whether a device can verify drafts for it: others run a token a step."""
    params = request.params
    return (
        request.grammar is None
        and not request.embeds
        and params.logprobs is None
        and not params.has_penalties
        and request.num_sampled >= params.min_tokens
        and len(request.stop_ids) <= MAX_STOP_IDS
    )
