"""What the cache has done so far, in numbers. Knows no tree."""

from __future__ import annotations

from dataclasses import dataclass, field

from pippin.cache.policy import Placement
from pippin.types import Component


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
