"""How many drafts a row of a reply verifies, and whose. Knows no plans.

    reply:   [ known | in flight, drafts of that step | input token, drafts of this step ]
             0   num_tokens               row_len: at most, since drafts may be rejected

What the host proposes begins behind the known tokens: the drafts of a step are those behind what
the step before it accepts, which the device knows first. What the device drafts it leaves for the
row's next step. Where there is both, a row verifies what is likelier to be accepted, as learnt: the
device's drafts are a class of confidence of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pippin.backends.base import MAX_STOP_IDS, DecodeRow, Proposal, StepPlan, StepResult
from pippin.metrics import DraftCounts, EngineMetrics
from pippin.scheduler.pacing.costs import Timed
from pippin.scheduler.request import Request
from pippin.scheduler.running_slot import RunningSlot
from pippin.scheduler.speculation.depth import Candidate, DepthPolicy
from pippin.scheduler.speculation.drafter import NO_GUESS, DeviceDrafter, Drafter, Guess

BY_DEVICE = -1  # the class of confidence of the device's drafts


@dataclass(frozen=True)
class Draft:
    """What a row verifies, and what the device's drafter is to leave for its next step."""

    depth: int = 0
    proposal: Proposal | None = None
    num_drafts: int = 0


NO_DRAFT = Draft()


@dataclass(frozen=True)
class _Offer:
    """Drafts that a row could have: of the host in this step, or of the device in the next."""

    running: RunningSlot
    depth: int
    guess: Guess | None  # None: of the device

    @property
    def confidence(self) -> int:
        return BY_DEVICE if self.guess is None else self.guess.confidence


@dataclass
class Speculation:
    drafter: Drafter | None  # on the host; None: the device's own is the only one
    max_depth: int  # that the backend verifies
    choose_depth: Callable[[RunningSlot], int]  # at most; it need not be possible
    policy: DepthPolicy | None = None  # None: as deep as that
    device: DeviceDrafter | None = None
    _confidences: dict[int, dict[str, int]] = field(default_factory=dict)  # by step in flight

    @property
    def no_counts(self) -> dict[str, DraftCounts]:
        """By drafter, of an engine that has just started."""
        names = [by.name for by in (self.drafter, self.device) if by is not None]
        return {name: DraftCounts(accepted_at=[0] * self.max_depth) for name in names}

    def draft(
        self,
        step: int,
        rows: Sequence[RunningSlot],
        num_rows: int,
        *,
        beside_prompts: bool = False,
    ) -> dict[RunningSlot, Draft]:
        """For rows of replies, all that sample in a step of `num_rows`; prompts wait for the time
        that drafts take, and what such steps take says nothing of drafts."""
        if not rows:
            return {}
        if self.policy is not None and beside_prompts:
            self.policy.usual_depth = 0
            return self._all_left(rows)
        if self.policy is not None and self.policy.rests(num_rows):
            return self._all_left(rows)
        may = [running for running in rows if may_speculate(running.request)]
        if self.drafter is not None:
            self.drafter.prepare(running.request for running in may)
        offers = [self._offer(running) for running in may]
        depths = [offer.depth for offer in offers]
        if self.policy is not None:
            candidates = [
                Candidate(offer.running.request.id, offer.depth, offer.confidence)
                for offer in offers
            ]
            depths = self.policy.choose(num_rows, candidates)
        self._confidences[step] = {o.running.request.id: o.confidence for o in offers}
        return {
            offer.running: self._draft(offer, depth)
            for offer, depth in zip(offers, depths, strict=True)
        }

    def settle(
        self,
        plan: StepPlan,
        owners: Mapping[int, RunningSlot],
        result: StepResult,
        metrics: EngineMetrics,
    ) -> None:
        """How many drafts of a step were accepted is known: bounds become lengths."""
        for earlier in [number for number in self._confidences if number < plan.step]:
            del self._confidences[earlier]  # it failed
        confidences = self._confidences.pop(plan.step, {})
        for row in plan.decode:
            running = owners[row.slot]
            if not row.depth:
                running.num_extra = 0
                continue
            accepted = len(result.tokens[row.slot]) - 1
            running.settle(row.depth, accepted)
            metrics.add_drafts(self._name(row), row.depth, accepted)
            request = running.request
            if request.finish is None:
                request.accepted_drafts += accepted
                request.rejected_drafts += row.depth - accepted
                if self.policy is not None:
                    confidence = BY_DEVICE if row.proposal is None else confidences[request.id]
                    self.policy.acceptance.observe(request.id, confidence, row.depth, accepted)

    def observe(self, timed: Timed) -> None:
        """What steps took that were committed."""
        if self.policy is not None:
            self.policy.observe(timed)

    def forget(self, request: Request) -> None:
        """It has ended."""
        if self.drafter is not None:
            self.drafter.forget(request)
        if self.policy is not None:
            self.policy.acceptance.forget(request.id)

    def flush(self) -> None:
        if self.drafter is not None:
            self.drafter.flush()

    def first_drafts(self, running: RunningSlot) -> int:
        """That the device's drafter is to leave behind a prompt's first token."""
        if self.device is None or not may_speculate(running.request):
            return 0
        wanted = min(self.choose_depth(running), self.max_depth, self.device.max_drafts)
        return wanted if self.policy is None else min(wanted, self.policy.usual_depth)

    def _offer(self, running: RunningSlot) -> _Offer:
        wanted = min(self.choose_depth(running), self.max_depth)
        by_host = NO_GUESS if self.drafter is None else self._guess(self.drafter, running, wanted)
        # What is proposed begins at the input token's place, or before it.
        num_skipped = running.row_len + 1 - running.request.num_tokens
        depth = max(0, min(wanted, len(by_host.tokens) - num_skipped))
        host = _Offer(running, depth, by_host)
        if self.device is None:
            return host
        device = _Offer(running, min(wanted, self.device.max_drafts), None)
        return host if self._worth(host) > self._worth(device) else device

    def _guess(self, drafter: Drafter, running: RunningSlot, wanted: int) -> Guess:
        wanted = min(wanted, _num_left(running))
        if wanted <= 0:
            return NO_GUESS
        request = running.request
        return drafter.propose(request, running.row_len + 1 + wanted - request.num_tokens)

    def _worth(self, offer: _Offer) -> float:
        """Drafts that are accepted on average; without a policy what is longer is better."""
        if self.policy is None:
            return offer.depth
        request_id = offer.running.request.id
        return sum(self.policy.acceptance.survival(request_id, offer.confidence, offer.depth))

    def _draft(self, offer: _Offer, depth: int) -> Draft:
        running, guess = offer.running, offer.guess
        if guess is None:
            return self._left(running, num_drafts=depth)
        if not depth:
            return self._left(running)
        start = running.request.num_tokens
        end = running.row_len + 1 + depth - start
        return Draft(depth, Proposal(start, guess.tokens[:end]))

    def _all_left(self, rows: Sequence[RunningSlot]) -> dict[RunningSlot, Draft]:
        return {running: self._left(running) for running in rows if running.num_drafts}

    def _left(self, running: RunningSlot, num_drafts: int = 0) -> Draft:
        """Those that the device left for this step."""
        return Draft(max(0, min(running.num_drafts, _num_left(running))), num_drafts=num_drafts)

    def _name(self, row: DecodeRow) -> str:
        by = self.device if row.proposal is None else self.drafter
        assert by is not None, "a row has drafts of a drafter"
        return by.name


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
