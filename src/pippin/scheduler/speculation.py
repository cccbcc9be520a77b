"""What guesses how replies go on. A wrong guess costs time, and never a token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import numpy as np

from pippin.backends.base import MAX_STOP_IDS, DecodeRow, Proposal, StepPlan, StepResult
from pippin.metrics import DraftCounts, EngineMetrics
from pippin.scheduler.pace import CostModel, Timed
from pippin.scheduler.request import Request, RunningSlot

NO_TOKENS = np.zeros(0, dtype=np.int32)


class Drafter:
    """On the host."""

    name = ""

    def prepare(self, requests: Iterable[Request]) -> None:
        """Some of these are about to be asked for, once a step. Takes bounded time."""

    def propose(self, request: Request, num_tokens: int) -> tuple[np.ndarray, int]:
        """At most so many tokens that could follow the known ones, int32; and how sure that is: how
        often these are right is learnt for each value by itself."""
        raise NotImplementedError

    def forget(self, request: Request) -> None:
        """It has ended."""

    def flush(self) -> None:
        """Forget what requests said that have ended: the cache is flushed."""


@dataclass(frozen=True)
class DeviceDrafter:
    """What a backend drafts with in its steps, for the next ones: it proposes nothing here."""

    name: str
    max_drafts: int  # that a step leaves for a row's next one


AT_FIRST = 0.7  # share of drafts that are right, before any was verified,
PRIOR_OF_ALL = 2.0  # and how many verified ones that counts as
PRIOR_OF_REQUEST = 8.0  # likewise, for a request, what is known of all of them
KEPT = 0.97  # of what was seen, at each draft: texts change


@dataclass
class _Places:
    """By place behind the input token: drafts whose forerunners were right."""

    tried: list[float] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def add(self, depth: int, accepted: int) -> None:
        tried, right = self.tried, self.right
        for place in range(min(depth, accepted + 1)):
            if place == len(tried):
                tried.append(0.0)
                right.append(0.0)
            tried[place] = KEPT * tried[place] + 1.0
            right[place] = KEPT * right[place] + (place < accepted)

    def rates(self, before: Sequence[float], prior: float) -> list[float]:
        """How often each place is right. `before`: what is believed without these, which counts as
        `prior` drafts."""
        seen = zip(self.tried, self.right, before, strict=False)
        known = [(right + prior * rate) / (tried + prior) for tried, right, rate in seen]
        return [*known, *before[len(known) :]]


class Acceptance:
    """Of drafts, by confidence: what all requests showed, and what each did."""

    def __init__(self) -> None:
        self._of_all: defaultdict[int, _Places] = defaultdict(_Places)
        self._of_request: dict[str, defaultdict[int, _Places]] = {}
        self._rates: dict[int, list[float]] = {}  # of all: every row of a step asks

    def observe(self, request_id: str, confidence: int, depth: int, accepted: int) -> None:
        self._of_all[confidence].add(depth, accepted)
        self._rates.pop(confidence, None)
        of_request = self._of_request.setdefault(request_id, defaultdict(_Places))
        of_request[confidence].add(depth, accepted)

    def survival(self, request_id: str, confidence: int, depth: int) -> list[float]:
        """For each of `depth` drafts, the chance that it and all before it are right."""
        rates = self._rates.get(confidence, [])
        if len(rates) < depth:
            rates = self._of_all[confidence].rates([AT_FIRST] * depth, PRIOR_OF_ALL)
            self._rates[confidence] = rates
        of_request = self._of_request.get(request_id)
        own = None if of_request is None else of_request.get(confidence)
        rates = rates[:depth] if own is None else own.rates(rates[:depth], PRIOR_OF_REQUEST)
        return list(accumulate(rates, mul))

    def forget(self, request_id: str) -> None:
        self._of_request.pop(request_id, None)


INCOME = 0.01  # of each step: what may be lost by trying
FIRST_BALANCE = 3.0  # steps,
MAX_BALANCE = 6.0  # and at most: gains from long ago pay for nothing
PATIENCE = 16  # steps in a row in which no depth pays: then there is a rest,
FIRST_REST, LONGEST_REST = 8, 64  # steps, twice as long each time, and a trial behind it,
LOOKS_AFTER_REST = 4  # steps in which drafts are chosen before the next rest
OTHER_DEPTH_EVERY = 24  # steps: one is deeper or less deep, so that costs are kept fresh
PLAIN_EVERY = 128  # steps: one without drafts shows what these are compared with
GROWTH = 2  # a step is at most so many times as deep as what is known, of so many rows
CLEARLY = 1.01  # what drafts promise is to be better by this factor


@dataclass(frozen=True)
class Candidate:
    """A row, and how many drafts it could verify."""

    request_id: str
    depth: int
    confidence: int = 0
    tokens: np.ndarray | None = None  # int32 [n]: proposed by the host; None: the device's drafts


@dataclass
class DepthPolicy:
    acceptance: Acceptance = field(default_factory=Acceptance)
    costs: CostModel = field(default_factory=CostModel)  # that the pace of prompts has, too
    _balance: float = FIRST_BALANCE  # in steps
    _num_steps: int = 0
    _num_in_vain: int = 0  # steps in a row
    _rest: int = FIRST_REST  # the next one
    _rests_until: int = 0  # a step
    usual_depth: int = 0  # of the rows of the last step

    def rests(self, rows: int) -> bool:
        """Called once a step: whether it has no drafts, so that none need be looked for."""
        self._num_steps += 1
        if self._num_steps < self._rests_until or self._balance < 0.0:
            return True
        return (
            self.costs.plain_seconds(rows) is None or self.costs.num_since_plain(rows) > PLAIN_EVERY
        )

    def choose(self, rows: int, candidates: Sequence[Candidate]) -> list[int]:
        """Drafts of each candidate in the next step, which has `rows` in all."""
        depths = self._choose(rows, candidates)
        self.usual_depth = round(sum(depths) / max(1, len(depths)))
        return depths

    def _choose(self, rows: int, candidates: Sequence[Candidate]) -> list[int]:
        deepest = max([1, *(candidate.depth for candidate in candidates)])
        most = min(deepest, max(1, GROWTH * self.costs.deepest_known(rows)))
        seconds = self.costs.depth_seconds(rows, most)
        depth = self._best(rows, candidates, seconds)
        if not depth:
            depth = int(self._is_trial(seconds))
        else:
            self._num_in_vain, self._rest = 0, FIRST_REST
            if not self._num_steps % OTHER_DEPTH_EVERY:
                more = 1 if self._num_steps // OTHER_DEPTH_EVERY % 2 else -1
                depth = max(1, min(depth + more, most))
        return [min(candidate.depth, depth) for candidate in candidates]

    def _best(self, rows: int, candidates: Sequence[Candidate], seconds: Sequence[float]) -> int:
        chances = [
            self.acceptance.survival(candidate.request_id, candidate.confidence, candidate.depth)
            for candidate in candidates
        ]
        tokens, most, best = float(rows), CLEARLY * rows / seconds[0], 0
        for place, taken in enumerate(seconds[1:]):
            tokens += sum(of_row[place] for of_row in chances if place < len(of_row))
            if tokens / taken > most:
                most, best = tokens / taken, place + 1
        return best

    def _is_trial(self, seconds: Sequence[float]) -> bool:
        """No depth pays: whether rows have a draft even so, behind a rest, if the account pays for
        it when all are wrong."""
        has_rested = self._num_steps == self._rests_until
        self._num_in_vain += 1
        if self._num_in_vain >= PATIENCE:
            self._num_in_vain = PATIENCE - LOOKS_AFTER_REST
            self._rests_until = self._num_steps + self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
        return has_rested and seconds[1] <= (1.0 + self._balance) * seconds[0]

    def observe(self, timed: Timed) -> None:
        """Settle what `costs` have seen. A step in which the device begins to draft for the next
        steps, or ends, is like no other, and costs what it costs."""
        if not timed.shows_drafts:
            return
        rows = timed.decode_rows / timed.num_decodes
        plain = self.costs.plain_seconds(rows, mean=True)
        if plain is None:
            return
        gained = 0.0
        if timed.depth or timed.num_turns:
            gained = (timed.decode_rows + timed.accepted) / rows - timed.seconds / plain
        self._balance = min(self._balance + gained + INCOME * timed.num_decodes, MAX_BALANCE)


BY_DEVICE = -1  # the class of confidence of the device's drafts


@dataclass(frozen=True)
class Draft:
    """What a row verifies, and what the device's drafter is to leave for its next step."""

    depth: int = 0
    proposal: Proposal | None = None
    num_drafts: int = 0


NO_DRAFT = Draft()


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
        offers = {running: self._offer(running) for running in may}
        depths = [offer.depth for offer in offers.values()]
        if self.policy is not None:
            depths = self.policy.choose(num_rows, list(offers.values()))
        self._confidences[step] = {o.request_id: o.confidence for o in offers.values()}
        return {
            running: self._draft(running, offer, depth)
            for (running, offer), depth in zip(offers.items(), depths, strict=True)
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

    def _offer(self, running: RunningSlot) -> Candidate:
        request = running.request
        wanted = min(self.choose_depth(running), self.max_depth)
        depth, confidence, tokens = 0, 0, NO_TOKENS
        num_wanted = min(wanted, _num_left(running))
        # What is proposed begins at the input token's place, or before it.
        num_skipped = running.row_len + 1 - request.num_tokens
        if self.drafter is not None and num_wanted > 0:
            tokens, confidence = self.drafter.propose(request, num_wanted + num_skipped)
            depth = max(0, min(wanted, len(tokens) - num_skipped))
        host = Candidate(request.id, depth, confidence, tokens)
        if self.device is None:
            return host
        device = Candidate(request.id, min(wanted, self.device.max_drafts), BY_DEVICE)
        return host if self._worth(host) > self._worth(device) else device

    def _worth(self, offer: Candidate) -> float:
        """Drafts that are accepted on average; without a policy what is longer is better."""
        if self.policy is None:
            return offer.depth
        survival = self.policy.acceptance.survival
        return sum(survival(offer.request_id, offer.confidence, offer.depth))

    def _draft(self, running: RunningSlot, offer: Candidate, depth: int) -> Draft:
        if offer.tokens is None:
            return self._left(running, num_drafts=depth)
        if not depth:
            return self._left(running)
        start = running.request.num_tokens
        end = running.row_len + 1 + depth - start
        return Draft(depth, Proposal(start, offer.tokens[:end]))

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
