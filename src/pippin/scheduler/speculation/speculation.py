"""How many drafts a row of a reply verifies, and which. Knows no plans.

    reply:   [ known | in flight, drafts of that step | input token, drafts of this step ]
             0   num_tokens               row_len: at most, since drafts may be rejected

What the host proposes begins behind the known tokens: the drafts of a step are those behind what
the step before it accepts, which the device knows first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pippin.backends.base import MAX_STOP_IDS, Proposal
from pippin.scheduler.request import Request
from pippin.scheduler.running_slot import RunningSlot
from pippin.scheduler.speculation.depth import Candidate, DepthPolicy
from pippin.scheduler.speculation.drafter import NO_GUESS, Drafter, Guess


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
    choose_depth: Callable[[RunningSlot], int]  # at most; it need not be possible
    policy: DepthPolicy | None = None  # None: as deep as that
    _confidences: dict[int, dict[str, int]] = field(default_factory=dict)  # by step in flight

    def draft(
        self, step: int, rows: Sequence[RunningSlot], num_rows: int
    ) -> dict[RunningSlot, Draft]:
        """For rows of replies, all that sample in a step of `num_rows`."""
        may = [running for running in rows if may_speculate(running.request)]
        self.drafter.prepare(running.request for running in may)
        if self.policy is not None and not self.policy.allows(num_rows):
            return {running: self._draft(running, 0, NO_GUESS) for running in may}
        possible = [(running, *self._guess(running)) for running in may]
        if self.policy is not None:
            candidates = [
                Candidate(running.request.id, depth, guess.confidence)
                for running, depth, guess in possible
            ]
            depths = self.policy.choose(num_rows, candidates)
        else:
            depths = [depth for _, depth, _ in possible]
        self._confidences[step] = {r.request.id: guess.confidence for r, _, guess in possible}
        return {
            running: self._draft(running, depth, guess)
            for (running, _, guess), depth in zip(possible, depths, strict=True)
        }

    def settle(self, step: int, request: Request, depth: int, accepted: int) -> None:
        """A step was committed, and of the request's drafts so many were accepted."""
        for earlier in [number for number in self._confidences if number < step]:
            del self._confidences[earlier]  # it failed, or had no drafts
        if self.policy is not None and request.finish is None:
            confidence = self._confidences.get(step, {}).get(request.id, 0)
            self.policy.acceptance.observe(request.id, confidence, depth, accepted)

    def forget(self, request: Request) -> None:
        """It has ended."""
        self.drafter.forget(request)
        if self.policy is not None:
            self.policy.acceptance.forget(request.id)

    def first_drafts(self, running: RunningSlot) -> int:
        """That the device's drafter is to leave behind a prompt's first token."""
        if not self.drafter.on_device or not may_speculate(running.request):
            return 0
        wanted = min(self.choose_depth(running), self.max_depth)
        return wanted if self.policy is None else min(wanted, self.policy.usual_depth)

    def _guess(self, running: RunningSlot) -> tuple[int, Guess]:
        """How many drafts are possible: of the next step by a device, which makes them then."""
        wanted = min(self.choose_depth(running), self.max_depth)
        if self.drafter.on_device:
            return wanted, NO_GUESS
        wanted = min(wanted, _num_left(running))
        if wanted <= 0:
            return 0, NO_GUESS
        start, input_at = running.request.num_tokens, running.row_len
        guess = self.drafter.propose(running.request, input_at + 1 + wanted - start)
        return max(0, min(wanted, start + len(guess.tokens) - input_at - 1)), guess

    def _draft(self, running: RunningSlot, depth: int, guess: Guess) -> Draft:
        if self.drafter.on_device:
            return Draft(max(0, min(running.num_drafts, _num_left(running))), num_drafts=depth)
        start = running.request.num_tokens
        end = running.row_len + 1 + depth - start
        return Draft(depth, Proposal(start, guess.tokens[:end])) if depth else NO_DRAFT


def _num_left(running: RunningSlot) -> int:
    """Drafts that `max_tokens` leaves room for."""
    request = running.request
    return request.params.max_tokens - request.num_sampled - 1


def may_speculate(request: Request) -> bool:
    """Whether a device can verify drafts for it: others run a token a step."""
    params = request.params
    return (
        params.speculate
        and request.grammar is None
        and not request.embeds
        and params.logprobs is None
        and not params.has_penalties
        and request.num_sampled >= params.min_tokens
        and len(request.stop_ids) <= MAX_STOP_IDS
    )
