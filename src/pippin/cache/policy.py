"""Where recurrent checkpoints are placed and what they are worth.

A state is large (as much as 1,500 tokens of KV) and serves only at its own position, so both
questions weigh bytes against the tokens that would otherwise be computed again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from pippin.types import GRID, Component

MAX_STRIDE = 2 * GRID  # a state every 128 tokens: at most 127 recomputed after a shared prefix
MAX_USES = 16  # beyond this a state is simply popular


class Placement(enum.Enum):
    """Why a state was captured where it was."""

    GRID = "grid"  # a multiple of the stride
    BOUNDARY = "boundary"  # the end of the system prompt or of a turn
    BRANCH = "branch"  # where this prompt leaves a path already in the tree
    PROMPT_END = "prompt_end"
    REPLY_END = "reply_end"


LEAF_PRIOR = 1.0
# How likely a request is to end its match exactly here, against LEAF_PRIOR. An interior state or
# window serves only requests that leave the path before the next one.
PRIOR = {
    Placement.GRID: 0.125,
    Placement.BOUNDARY: 0.5,
    Placement.BRANCH: 1.0,
    Placement.PROMPT_END: 0.5,
    Placement.REPLY_END: 0.5,
}


@dataclass(frozen=True)
class CheckpointPolicy:
    """Chooses checkpoint positions."""

    state_bytes: int = 0
    kv_bytes_per_token: int = 0
    prompt_budget_bytes: int | None = None  # for the states of one sequence; None: no limit

    def stride(self, num_tokens: int) -> int:
        """Tokens between grid checkpoints of a sequence this long: 64, or 128 if states are dear.

        Only a budget that the states of one sequence would overrun widens it past the bound.
        """
        stride = GRID
        if self.state_bytes > GRID * self.kv_bytes_per_token:
            stride = MAX_STRIDE
        if self.prompt_budget_bytes is not None and self.state_bytes:
            affordable = max(1, self.prompt_budget_bytes // self.state_bytes)
            while num_tokens // stride > affordable:
                stride *= 2
        return stride

    def placements(
        self,
        start: int,
        end: int,
        *,
        prompt_len: int,
        boundaries: Iterable[int] = (),
        branch: int = 0,
    ) -> dict[int, Placement]:
        """Where a prefill chunk over [start, end) should capture states, ascending, and why.

        Boundaries and branches are rounded down to the grid. The prompt's end is exact, for the
        next turn and for the same prompt; the last grid point before it serves the same prompt
        where the end was evicted or has no hidden vector.
        """
        found: dict[int, Placement] = {}
        stride = self.stride(prompt_len)
        for position in range(start - start % stride + stride, end + 1, stride):
            found[position] = Placement.GRID
        found[_grid_floor(prompt_len - 1)] = Placement.GRID
        for boundary in boundaries:
            found[_grid_floor(boundary)] = Placement.BOUNDARY
        if 0 < branch < prompt_len:
            found[_grid_floor(branch)] = Placement.BRANCH
        found[prompt_len] = Placement.PROMPT_END
        return {position: found[position] for position in sorted(found) if start < position <= end}

    def captures_decode(self, position: int) -> bool:
        """Whether the state after `position` tokens is worth keeping while a reply grows."""
        return position % self.stride(position) == 0

    @staticmethod
    def thinned(positions: Iterable[int], num_kept: int) -> tuple[int, ...]:
        """The `num_kept` checkpoints of a growing reply to keep when bytes are short, ascending.

        The last one always: the next turn continues there. Of the others, the one is dropped whose
        loss leaves the smallest gap for its distance from the end, so gaps widen with the distance,
        also when a growing reply is thinned repeatedly.
        """
        kept = sorted(positions)
        if num_kept < 1:
            return ()
        while len(kept) > num_kept:
            around = [0, *kept]
            gaps = [
                (after - before) / (kept[-1] - position)
                for before, position, after in zip(around, kept[:-1], kept[1:], strict=False)
            ]
            del kept[gaps.index(min(gaps))]
        return tuple(kept)


def worth(prior: float, num_uses: int, num_saved: int, nbytes: int) -> float:
    """Tokens saved per byte, times how likely it is that a request needs them."""
    return (prior + min(num_uses, MAX_USES)) * num_saved / max(nbytes, 1)


def _grid_floor(position: int) -> int:
    return position - position % GRID


@dataclass
class PlacementStats:
    """How one kind of checkpoint has paid off."""

    placed: int = 0
    used: int = 0  # matches that ended on one
    tokens_saved: int = 0  # by those matches, against the next state further up
    evicted: int = 0


@dataclass
class CacheStats:
    """Counters since start. A lookup counts when its match is locked, so retries do not."""

    lookups: int = 0
    hits: int = 0
    whole_hits: int = 0  # nothing of the prompt was left to compute
    tokens_looked_up: int = 0
    tokens_matched: int = 0
    tokens_inserted: int = 0
    bytes_inserted: int = 0
    bytes_duplicate: int = 0  # handed in, but already in the tree
    gaps: int = 0  # inserts refused because the prefix had been evicted
    bytes_evicted: int = 0
    damaged: int = 0  # payloads that were found not to be what they were
    evictions: dict[Component, int] = field(default_factory=lambda: dict.fromkeys(Component, 0))
    placements: dict[Placement, PlacementStats] = field(
        default_factory=lambda: {placement: PlacementStats() for placement in Placement}
    )

    def count_lookup(self, matched: int, prompt_len: int) -> None:
        self.lookups += 1
        self.hits += matched > 0
        self.whole_hits += matched == prompt_len > 0
        self.tokens_looked_up += prompt_len
        self.tokens_matched += matched

    @property
    def hit_rate(self) -> float:
        """The share of looked-up tokens that need not be computed."""
        return self.tokens_matched / self.tokens_looked_up if self.tokens_looked_up else 0.0
