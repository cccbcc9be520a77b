"""How many drafts each row of a step verifies: as many as make the most tokens a second.

Knows what drafts are worth and what they cost, from steps; knows no text and no device.

    tokens a second of a step of depth d  =  (rows + chances of drafts to be accepted) / seconds(d)

Every row has as many as it can, up to d, since devices run all rows as deep as the deepest. No
estimate is trusted with much: an account holds what steps with drafts gained over steps without, as
measured, and lost, and a small share of all time on top. While it is overdrawn there are no drafts.
So all that is tried is paid for by what was gained, or by that share. Where no depth pays there is
a rest, longer each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pippin.scheduler.pacing.costs import Timed
from pippin.scheduler.speculation.acceptance import Acceptance
from pippin.scheduler.speculation.draft_costs import DraftCosts

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
