"""Cuts prompts into chunks that end where checkpoints are wanted. Knows no queue and no arrays."""

from __future__ import annotations

from dataclasses import dataclass

from pippin.backends.base import PrefillRow, Restore
from pippin.cache.policy import CheckpointPolicy
from pippin.scheduler.request import Request
from pippin.types import GRID, ModelSpec


@dataclass(frozen=True)
class Chunker:
    spec: ModelSpec
    policy: CheckpointPolicy | None  # None: nothing is cached, so nothing is captured
    smallest: int = 1  # tokens that are worth a forward if they do not end their prompt
    on_grid: bool = False  # whole grid blocks and a last, shorter chunk that nobody shares

    def is_worth(self, request: Request, budget: int) -> bool:
        """Whether `budget` tokens are more than a crumb of what the prompt still needs."""
        return budget >= min(self.smallest, request.prompt_len - request.held)

    def next_chunk(
        self, step: int, request: Request, budget: int, restore: Restore | None
    ) -> PrefillRow:
        """At most `budget` more tokens of the prompt; counts them as held from now on.

        `budget` must be worth it: then there is at least one.
        """
        start = request.held
        end = self._chunk_end(request, start, min(request.prompt_len, start + budget))
        last = end == request.prompt_len
        request.held = end
        request.last_step = step
        if last:
            request.phase = "decode"
            request.num_sampled = 1
        return PrefillRow(
            slot=request.slot,
            start=start,
            tokens=request.prompt[start:end],
            samples=last,
            restore=restore,
            checkpoints=self._checkpoints(request, start, end),
            captures=self._captures(request, end),
            masked=request.grammar is not None,
        )

    def _chunk_end(self, request: Request, start: int, end: int) -> int:
        """Where a chunk that may reach `end` should stop.

        A chunk that does not end the prompt ends on the grid if it can, so that its end is a
        checkpoint, and else at a multiple of `smallest`, so that the next one can. States
        inside it can be tapped only every GRID tokens from its start, and only if the backend taps
        at all: otherwise it ends at the first checkpoint wanted.
        """
        if self.on_grid:
            return max(end - end % GRID, min(start + GRID, request.prompt_len))
        if end < request.prompt_len:
            block = end - end % GRID
            end = block if block > start else end - (end - start) % self.smallest
        for position in self._checkpoints(request, start, end):
            tappable = self.spec.state_taps and (position - start) % GRID == 0
            if not tappable:
                return position
        return end

    def _checkpoints(self, request: Request, start: int, end: int) -> tuple[int, ...]:
        if self.policy is None or not self.spec.state_bytes or not self._captures(request, end):
            return ()
        return self.policy.positions(
            start,
            end,
            prompt_len=request.prompt_len,
            boundaries=request.boundaries,
            branch=request.branch,
        )

    def _captures(self, request: Request, end: int) -> bool:
        shared = not self.on_grid or end % GRID == 0
        return self.policy is not None and shared and not request.wants_prompt_logprobs
