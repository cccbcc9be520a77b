"""What a step computes of replies, and what is kept of those that end. Knows no prompts, no queue.

A reply gets one token a step, and more where drafts are verified and accepted. Where a grammar
forces several they are known beforehand, and a chunk runs all of them at once, if that pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pippin.backends.base import DecodeRow, PrefillRow, Retire
from pippin.cache.policy import CheckpointPolicy
from pippin.scheduler.memory.claims import Claims
from pippin.scheduler.running_slot import RunningSlot, Stage
from pippin.scheduler.speculation.speculation import NO_DRAFT, Draft, Speculation
from pippin.types import GRID

# Whether chunks of these lengths are to be run beside so many streams, their own among them.
PaysOff = Callable[[Sequence[int], int], bool]


@dataclass
class ReplyRows:
    """A step's rows of replies."""

    decode: list[DecodeRow] = field(default_factory=list)
    chunks: list[PrefillRow] = field(default_factory=list)
    starved: list[RunningSlot] = field(default_factory=list)  # they have no bytes to grow into

    @property
    def num_streams(self) -> int:
        return len(self.decode) + len(self.chunks)

    @property
    def num_drafts(self) -> int:
        return sum(row.depth for row in self.decode)


@dataclass(frozen=True)
class ReplyPlanner:
    claims: Claims
    policy: CheckpointPolicy | None  # None: replies are not cached
    has_states: bool  # the model is recurrent: a growing reply leaves checkpoints
    runs_chunks: bool = True  # False: also tokens that are known run one by one
    speculation: Speculation | None = None  # None: no drafts

    def plan(
        self,
        step: int,
        running_slots: Iterable[RunningSlot],
        pays_off: PaysOff,
        *,
        prompts_start: bool = False,
    ) -> ReplyRows:
        """A row for each reply that goes on. `prompts_start`: some may, in this step."""
        running_slots = list(running_slots)
        going_on = [h for h in running_slots if self._samples(h) or self.runs_last_token(h)]
        ends = self._chunk_ends(going_on, pays_off)
        going = any(running.request.phase == "prefill" for running in running_slots)
        beside_prompts = prompts_start or going
        rows, drafts = ReplyRows(), self._drafts(step, going_on, beside_prompts)
        for running in going_on:
            if running in ends and self._fits(running, ends[running]):
                rows.chunks.append(self._chunk(step, running, ends[running]))
            elif (draft := self._fitting(running, drafts.get(running, NO_DRAFT))) is not None:
                rows.decode.append(self._token(step, running, draft))
            elif self._samples(running):
                rows.starved.append(running)
            else:
                running.enter(Stage.CLOSED)
        return rows

    def _drafts(
        self, step: int, going_on: Sequence[RunningSlot], beside_prompts: bool
    ) -> dict[RunningSlot, Draft]:
        if self.speculation is None:
            return {}
        sampling = [running for running in going_on if self._samples(running)]
        return self.speculation.draft(step, sampling, len(going_on), beside_prompts=beside_prompts)

    def _fitting(self, running: RunningSlot, draft: Draft) -> Draft | None:
        """What the next row verifies, if anything; None if there are no bytes for its token."""
        end = running.row_len + 1
        if self._fits(running, end + draft.depth):
            return draft
        return NO_DRAFT if draft.depth and self._fits(running, end) else None

    def _fits(self, running: RunningSlot, end: int) -> bool:
        return end <= running.row_tokens or self.claims.grow(running, end)

    def _samples(self, running: RunningSlot) -> bool:
        request = running.request
        if request.phase != "decode" or not request.samples_left:
            return False
        return running.stage is Stage.RUNNING and not request.waits_for_mask

    def _token(self, step: int, running: RunningSlot, draft: Draft) -> DecodeRow:
        request, position = running.request, running.row_len
        end = position + 1 + draft.depth
        # Of a reply that has ended the next token to run is drawn once more, if it is not the last.
        samples = self._samples(running) or (not request.running and end < request.num_tokens)
        running.plan_tokens(step, end, samples=samples, depth=draft.depth)
        running.num_drafts = draft.num_drafts
        masked = request.grammar is not None
        checkpoint = self._keeps_checkpoint(step, running, end - end % GRID, position)
        return DecodeRow(
            running.slot,
            position,
            samples,
            checkpoint,
            masked,
            draft.depth,
            draft.proposal,
            draft.num_drafts,
        )

    # ---- tokens that are known beforehand --------------------------------------------------

    def _chunk_ends(
        self, going_on: Sequence[RunningSlot], pays_off: PaysOff
    ) -> dict[RunningSlot, int]:
        """Where the chunks end that this step runs of replies."""
        if not self.runs_chunks:
            return {}
        ends = {
            running: self._end_of_known(running)
            for running in going_on
            if running.num_known > 1 and self._samples(running)
        }
        ends = {running: end for running, end in ends.items() if end > running.row_len + 1}
        lengths = [end - running.row_len for running, end in ends.items()]
        return ends if lengths and pays_off(lengths, len(going_on)) else {}

    def _end_of_known(self, running: RunningSlot) -> int:
        """A checkpoint is captured by the row of one token that reaches it: stop short of it."""
        end = running.request.num_tokens
        if self.policy is None or not self.has_states:
            return end
        grid = range((running.row_len // GRID + 1) * GRID, end + 1, GRID)
        return next((at - 1 for at in grid if self.policy.captures_decode(at)), end)

    def _chunk(self, step: int, running: RunningSlot, end: int) -> PrefillRow:
        start = running.row_len
        running.plan_tokens(step, end, samples=True)
        tokens = running.request.tokens(end)[start:]
        return PrefillRow(running.slot, start, tokens, samples=True, masked=True)

    # ---- ends ------------------------------------------------------------------------------

    def runs_last_token(self, running: RunningSlot) -> bool:
        """Whether the end of a reply is still to be run, so that the tree gets all of it.

        Once every sample is planned, the next step can do so before that token is known.
        """
        request = running.request
        if self.policy is None or request.embeds or running.num_left > 0 or running.num_unsure:
            return False
        if running.stage is not Stage.RUNNING:
            return False
        if request.phase == "decode":
            return not request.samples_left and running.row_len < request.max_total
        return request.completed and not running.tainted and running.row_len < request.num_tokens

    def retire(self, step: int, running: RunningSlot) -> Retire:
        """The row's end; the tree gets what it holds of a reply that ended or is to be resumed."""
        kept = running.request.completed or running.runs
        captures = self.policy is not None and kept and running.is_exact
        row = self.claims.fit_retire(step, running, captures=captures)
        running.retire(row.end)
        return row

    def _keeps_checkpoint(self, step: int, running: RunningSlot, wanted: int, before: int) -> bool:
        """Whether a state is to be kept of a row that grows past `wanted` tokens, and fits.

        It is captured behind the row's input token: at `wanted` if the row has no drafts, or else
        about there.
        """
        if wanted <= max(before, running.checkpoint_len):
            return False
        if self.policy is None or not self.has_states or not self.policy.captures_decode(wanted):
            return False
        running.checkpoint_len = wanted
        return self.claims.fit_checkpoint(step, running, wanted)
