"""Where chunks end and which states they capture. Knows no queue, no bytes and no arrays."""

from __future__ import annotations

from dataclasses import dataclass

from pippin.cache.policy import CheckpointPolicy
from pippin.scheduler.running_slot import Quality, RunningSlot
from pippin.types import GRID, ModelSpec


@dataclass(frozen=True)
class Chunk:
    """Known tokens [start, end) of a request, to be run in one step."""

    start: int
    end: int
    checkpoints: tuple[int, ...] = ()  # positions in (start, end] whose states are wanted
    captures: bool = False  # the tree wants them


@dataclass(frozen=True)
class Chunker:
    spec: ModelSpec
    policy: CheckpointPolicy | None  # None: nothing is cached, so nothing is captured
    smallest: int = 1  # tokens that are worth a forward if they do not end their prompt
    on_grid: bool = False  # whole grid blocks and a last, shorter chunk that is not shared

    def least(self, num_left: int, budget: int) -> int:
        """The fewest tokens worth running of a request that has `num_left` to run.

        A step whose whole `budget` is less explores what chunks cost.
        """
        return min(self.smallest, num_left, max(budget, 1))

    def next_chunk(self, running: RunningSlot, num_tokens: int) -> Chunk:
        """At most `num_tokens` more of what is known; at least one, given `least` or more.

        Where all that is known was restored, an empty chunk: only the next token is wanted.
        """
        start = running.row_len
        end = self._end(running, start, min(running.prefill_len, start + num_tokens))
        captures = start < end and self._captures(running, end)
        return Chunk(start, end, self._checkpoints(running, start, end), captures)

    def _end(self, running: RunningSlot, start: int, end: int) -> int:
        """Where a chunk that may reach `end` should stop.

        States inside it can be tapped only every GRID tokens from its start, and only if the
        backend taps at all: otherwise it ends at the first checkpoint wanted. So a chunk that does
        not end the prompt ends on the grid if a whole block fits; else it is one of the fewest
        pieces, all alike, up to the next checkpoint.
        """
        if self.on_grid:
            return max(end - end % GRID, min(start + GRID, running.prefill_len))
        if end < running.prefill_len and self.spec.state_bytes:
            end = end - end % GRID if end - start >= GRID else self._piece(running, start, end)
        for position in self._checkpoints(running, start, end):
            tappable = self.spec.state_taps and (position - start) % GRID == 0
            if not tappable:
                return position
        return end

    def _piece(self, running: RunningSlot, start: int, end: int) -> int:
        stop = next(iter(self._checkpoints(running, start, running.prefill_len)), None)
        left = (stop or running.prefill_len) - start
        num_pieces = -(-left // (end - start))
        return start + -(-left // num_pieces)

    def _checkpoints(self, running: RunningSlot, start: int, end: int) -> tuple[int, ...]:
        if self.policy is None or not self.spec.state_bytes or not self._captures(running, end):
            return ()
        found = self.policy.placements(
            start,
            end,
            prompt_len=running.prefill_len,
            boundaries=running.request.boundaries,
            branch=running.branch,
        )
        return tuple(found)

    def _captures(self, running: RunningSlot, end: int) -> bool:
        return running.quality is Quality.SOUND and end <= running.capture_len
