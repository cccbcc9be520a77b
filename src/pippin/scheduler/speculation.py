"""What guesses how replies go on. A wrong guess costs time, and never a token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from zlib import crc32

import numpy as np

from pippin.backends.base import MAX_STOP_IDS, DecodeRow, Proposal, StepPlan, StepResult
from pippin.metrics import DraftCounts, EngineMetrics
from pippin.scheduler.pace import DraftCosts, Timed
from pippin.scheduler.request import Request, RunningSlot


@dataclass(frozen=True)
class Guess:
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))  # int32 [n]
    confidence: int = 0  # how often these are right is learnt for each value by itself


NO_GUESS = Guess()


class Drafter(Protocol):
    """On the host."""

    @property
    def name(self) -> str: ...

    def prepare(self, requests: Iterable[Request]) -> None:
        """Some of these are about to be asked for, once a step. Takes bounded time."""
        ...

    def propose(self, request: Request, num_tokens: int) -> Guess:
        """At most `num_tokens` tokens that could follow the request's known ones."""
        ...

    def forget(self, request: Request) -> None:
        """It has ended."""
        ...

    def flush(self) -> None:
        """Forget what requests said that have ended: the cache is flushed."""
        ...


class KeepsNothing:
    """Of requests: a drafter whose proposals depend on nothing that it has to keep."""

    def prepare(self, requests: Iterable[Request]) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass

    def flush(self) -> None:
        pass


@dataclass(frozen=True)
class DeviceDrafter:
    """What a backend drafts with in its steps, for the next ones: it proposes nothing here."""

    name: str
    max_drafts: int  # that a step leaves for a row's next one


class OracleDrafter(KeepsNothing):
    """Right at a given share of places, which depend on the request and the place alone."""

    name = "oracle"

    def __init__(
        self, reply_of: Callable[[Request], Sequence[int]], share_right: float, vocab_size: int
    ) -> None:
        self._reply_of = reply_of
        self._share_right = share_right
        self._vocab_size = vocab_size

    def propose(self, request: Request, num_tokens: int) -> Guess:
        first = len(request.output)
        known = self._reply_of(request)[first : first + num_tokens]
        tokens = np.array(known, dtype=np.int32)
        name = request.id.encode()
        for place in range(len(tokens)):
            chance = crc32(name + (first + place).to_bytes(4, "little")) / 2**32
            if chance >= self._share_right:
                tokens[place] = (tokens[place] + 1) % self._vocab_size
        return Guess(tokens)


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

    def survival(self, before: Sequence[float], prior: float) -> list[float]:
        """For each place, the chance that a draft there and all before it are right.

        `before`: rates that are believed without these, and count as `prior` drafts."""
        chances, chance, known = [], 1.0, len(self.tried)
        for place, rate in enumerate(before):
            if place < known:
                rate = (self.right[place] + prior * rate) / (self.tried[place] + prior)
            chance *= rate
            chances.append(chance)
        return chances

    def rates(self, before: float, prior: float) -> list[float]:
        known = zip(self.tried, self.right, strict=True)
        return [(right + prior * before) / (tried + prior) for tried, right in known]


@dataclass
class _OfAll:
    """What all requests showed for a confidence, and what follows: every row of a step asks."""

    places: _Places = field(default_factory=_Places)
    rates: list[float] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)

    def know(self, depth: int) -> None:
        """Bring what follows up to date, for so many drafts at least."""
        if len(self.rates) < depth:
            known = self.places.rates(AT_FIRST, PRIOR_OF_ALL)
            self.rates = known + [AT_FIRST] * (depth - len(known))
            self.survival = _NOTHING.survival(self.rates, 0.0)


_NOTHING = _Places()


class Acceptance:
    def __init__(self) -> None:
        self._of_all: defaultdict[int, _OfAll] = defaultdict(_OfAll)
        self._of_request: dict[str, dict[int, _Places]] = {}

    def observe(self, request_id: str, confidence: int, depth: int, accepted: int) -> None:
        of_all = self._of_all[confidence]
        of_all.places.add(depth, accepted)
        of_all.rates = []
        of_request = self._of_request.setdefault(request_id, {})
        if confidence not in of_request:
            of_request[confidence] = _Places()
        of_request[confidence].add(depth, accepted)

    def survival(self, request_id: str, confidence: int, depth: int) -> list[float]:
        """For each of `depth` drafts, the chance that it and all before it are right."""
        of_all = self._of_all[confidence]
        of_all.know(depth)
        own = self._of_request.get(request_id, {}).get(confidence)
        if own is None:
            return of_all.survival[:depth]
        return own.survival(of_all.rates[:depth], PRIOR_OF_REQUEST)

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


@dataclass
class DepthPolicy:
    acceptance: Acceptance = field(default_factory=Acceptance)
    costs: DraftCosts = field(default_factory=DraftCosts)
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
        return self.costs.plain(rows) is None or self.costs.num_since_plain(rows) > PLAIN_EVERY

    def choose(self, rows: int, candidates: Sequence[Candidate]) -> list[int]:
        """Drafts of each candidate in the next step, which has `rows` in all."""
        depths = self._choose(rows, candidates)
        self.usual_depth = round(sum(depths) / max(1, len(depths)))
        return depths

    def _choose(self, rows: int, candidates: Sequence[Candidate]) -> list[int]:
        deepest = max([1, *(candidate.depth for candidate in candidates)])
        most = min(deepest, max(1, GROWTH * self.costs.deepest_known(rows)))
        seconds = self.costs.seconds(rows, most)
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
        """Steps with prompts show little of what drafts took, nor does the first of a shape, which
        may be compiled. One in which the device begins to draft for the next steps, or ends, is
        like no other, and costs what it costs."""
        if not timed.num_decodes or timed.num_prefills or timed.num_new or timed.seconds <= 0.0:
            return
        steps = timed.num_decodes
        rows, seconds = timed.decode_rows / steps, timed.seconds / steps
        if not timed.num_turns:
            self.costs.observe(rows, round(timed.depth / steps), seconds)
        plain = self.costs.plain_mean(rows)
        if plain is None:
            return
        gained = 0.0
        if timed.depth or timed.num_turns:
            gained = (timed.decode_rows + timed.accepted) / rows - timed.seconds / plain
        self._balance = min(self._balance + gained + INCOME * steps, MAX_BALANCE)


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
