"""What a step computes of replies, and what is kept of those that end. Knows no prompts, no queue.

A reply gets one token a step. Where a grammar forces several they are known beforehand, and a chunk
runs all of them at once, if that pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pippin.backends.base import DecodeRow, PrefillRow, Retire
from pippin.cache.policy import CheckpointPolicy
from pippin.scheduler.claims import Claims
from pippin.scheduler.holding import Holding
from pippin.types import GRID

# Whether chunks of these lengths are to be run beside so many streams, their own among them.
PaysOff = Callable[[Sequence[int], int], bool]


@dataclass
class ReplyRows:
    """A step's rows of replies."""

    decode: list[DecodeRow] = field(default_factory=list)
    chunks: list[PrefillRow] = field(default_factory=list)
    starved: list[Holding] = field(default_factory=list)  # they have no bytes to grow into

    @property
    def num_streams(self) -> int:
        return len(self.decode) + len(self.chunks)


@dataclass(frozen=True)
class ReplyPlanner:
    claims: Claims
    policy: CheckpointPolicy | None  # None: replies are not cached
    has_states: bool  # the model is recurrent: a growing reply leaves checkpoints
    runs_chunks: bool = True  # False: also tokens that are known run one by one

    def plan(self, step: int, holdings: Iterable[Holding], pays_off: PaysOff) -> ReplyRows:
        """A row for each reply that goes on."""
        going_on = [h for h in holdings if self._samples(h) or self.runs_last_token(h)]
        ends = self._chunk_ends(going_on, pays_off)
        rows = ReplyRows()
        for holding in going_on:
            if holding in ends and self._fits(holding, ends[holding]):
                rows.chunks.append(self._chunk(step, holding, ends[holding]))
            elif self._fits(holding, holding.held + 1):
                rows.decode.append(self._token(step, holding))
            elif self._samples(holding):
                rows.starved.append(holding)
            else:
                holding.keeps_last = False
        return rows

    def _fits(self, holding: Holding, end: int) -> bool:
        return end <= holding.row_tokens or self.claims.grow(holding, end)

    def _samples(self, holding: Holding) -> bool:
        request = holding.request
        return request.phase == "decode" and request.samples_left and not holding.retracting

    def _token(self, step: int, holding: Holding) -> DecodeRow:
        request, end = holding.request, holding.held + 1
        # Of a reply that has ended the next token to run is drawn once more, if it is not the last.
        samples = self._samples(holding) or (not request.running and end < request.num_tokens)
        holding.plan_tokens(step, end, samples=samples)
        checkpoint = end % GRID == 0 and self._keeps_checkpoint(step, holding, end)
        masked = request.grammar is not None
        return DecodeRow(holding.slot, end - 1, samples, checkpoint, masked)

    # ---- tokens that are known beforehand --------------------------------------------------

    def _chunk_ends(self, going_on: Sequence[Holding], pays_off: PaysOff) -> dict[Holding, int]:
        """Where the chunks end that this step runs of replies."""
        if not self.runs_chunks:
            return {}
        ends = {
            holding: self._end_of_known(holding)
            for holding in going_on
            if holding.num_known > 1 and self._samples(holding)
        }
        ends = {holding: end for holding, end in ends.items() if end > holding.held + 1}
        lengths = [end - holding.held for holding, end in ends.items()]
        return ends if lengths and pays_off(lengths, len(going_on)) else {}

    def _end_of_known(self, holding: Holding) -> int:
        """A checkpoint is captured by the row of one token that reaches it: stop short of it."""
        end = holding.request.num_tokens
        if self.policy is None or not self.has_states:
            return end
        grid = range((holding.held // GRID + 1) * GRID, end + 1, GRID)
        return next((at - 1 for at in grid if self.policy.captures_decode(at)), end)

    def _chunk(self, step: int, holding: Holding, end: int) -> PrefillRow:
        start = holding.held
        holding.plan_tokens(step, end, samples=True)
        tokens = holding.request.tokens(end)[start:]
        return PrefillRow(holding.slot, start, tokens, samples=True, masked=True)

    # ---- ends ------------------------------------------------------------------------------

    def runs_last_token(self, holding: Holding) -> bool:
        """Whether the end of a reply is still to be run, so that the tree gets all of it.

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
