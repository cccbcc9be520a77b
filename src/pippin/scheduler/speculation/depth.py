"""How many drafts each row of a step verifies: as many as make the most tokens a second.

Knows what drafts are worth and what they cost, from steps; knows no text and no device.

    tokens a second of a step with m drafts  =  (rows + their chances to be accepted) / seconds(m)

The m drafts are the likeliest of all rows. No estimate is trusted with much: an account holds what
steps with drafts gained over steps without, as measured, and lost, and a small share of all time on
top. While it is overdrawn there are no drafts. So all that is tried is paid for by what was gained,
or by that share.
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
STEPS_BETWEEN_TRIALS = 32  # of a row whose drafts do not pay
TRIAL_DEPTH = 2
STEPS_BETWEEN_OTHERS = 12  # with drafts, of which one has some more or fewer: costs are kept fresh
STEPS_BETWEEN_PLAIN = 64  # a step without drafts shows what these are compared with
FIRST_DRAFTS = 2  # of a step, or one for each row, until more are known,
GROWTH = 2  # and then so many times as many as are
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
    _last_trial: int = 0
    usual_depth: int = 0  # of the rows of the last step

    def choose(self, rows: int, candidates: Sequence[Candidate]) -> list[int]:
        """Drafts of each candidate in the next step, which has `rows` in all."""
        depths = self._choose(rows, candidates)
        self.usual_depth = round(sum(depths) / max(1, len(depths)))
        return depths

    def _choose(self, rows: int, candidates: Sequence[Candidate]) -> list[int]:
        self._num_steps += 1
        if not any(candidate.depth for candidate in candidates) or not self.allows(rows):
            return [0] * len(candidates)
        depths = self._best(rows, candidates)
        if self._num_steps - self._last_trial >= STEPS_BETWEEN_TRIALS and 0 in depths:
            self._last_trial = self._num_steps
            self._add_trials(rows, candidates, depths)
        return depths

    def _add_trials(self, rows: int, candidates: Sequence[Candidate], depths: list[int]) -> None:
        """Drafts for rows that have none: no more than the account pays for if all are wrong."""
        most = self._most(rows, sum(candidate.depth for candidate in candidates))
        seconds = self.costs.seconds(rows, most)
        affordable = (1.0 + self._balance) * seconds[0]
        left = sum(taken <= affordable for taken in seconds) - 1 - sum(depths)
        for place in range(len(depths)):
            row = (self._num_steps + place) % len(depths)  # another one first each time
            if not depths[row]:
                depths[row] = max(0, min(candidates[row].depth, TRIAL_DEPTH, left))
                left -= depths[row]

    def _most(self, rows: int, offered: int) -> int:
        """Drafts of a step: a few more than were seen, since what more of them cost is a guess."""
        return min(offered, max(FIRST_DRAFTS, rows, GROWTH * self.costs.most_known(rows)))

    def allows(self, rows: int) -> bool:
        """Whether a step of so many may have drafts at all."""
        if self._balance < 0.0 or self.costs.plain(rows) is None:
            return False
        return self.costs.num_since_plain(rows) <= STEPS_BETWEEN_PLAIN

    def observe(self, timed: Timed) -> None:
        """Steps with prompts too show little of what drafts took, and steps in which the device
        drafts for the next ones, and verifies nothing, are neither plain nor what they pay for."""
        if not timed.num_decodes or timed.num_prefills or timed.seconds <= 0.0:
            return
        if timed.drafts_left and not timed.drafts:
            return
        steps = timed.num_decodes
        rows = timed.decode_rows / steps
        self.costs.observe(rows, timed.drafts / steps, timed.seconds / steps)
        plain = self.costs.plain_mean(rows)
        if plain is None:
            return
        gained = 0.0
        if timed.drafts:
            gained = (timed.decode_rows + timed.accepted) / rows - timed.seconds / plain
        self._balance = min(self._balance + gained + INCOME * steps, MAX_BALANCE)

    def _best(self, rows: int, candidates: Sequence[Candidate]) -> list[int]:
        chances = [
            self.acceptance.survival(candidate.request_id, candidate.confidence, candidate.depth)
            for candidate in candidates
        ]
        ranked = [(-chance, row) for row, of_row in enumerate(chances) for chance in of_row]
        ranked.sort()  # of a row, the first drafts are the likeliest
        seconds = self.costs.seconds(rows, self._most(rows, len(ranked)))
        tokens, best, number = float(rows), CLEARLY * rows / seconds[0], 0
        for place, taken in enumerate(seconds[1:]):
            tokens -= ranked[place][0]
            if tokens / taken > best:
                best, number = tokens / taken, place + 1
        if number and not self._num_steps % STEPS_BETWEEN_OTHERS:
            more = rows if self._num_steps // STEPS_BETWEEN_OTHERS % 2 else -rows
            number = max(1, min(number + more, len(seconds) - 1))
        depths = [0] * len(candidates)
        for _, row in ranked[:number]:
            depths[row] += 1
        return depths
