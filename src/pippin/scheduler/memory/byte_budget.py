"""One budget of bytes over rows, checkpoints, captures in flight and the tree. Knows no arrays.

    capacity = claimed (rows, checkpoints, captures in flight) + the tree + free

Whatever is claimed comes out of what is free, and then out of what the tree can evict. A claim that
cannot be met is refused before anything is evicted: asking costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from pippin.cache.prefix_cache import PrefixCache


@dataclass
class ByteBudget:
    """`capacity` is what the weights and the work space leave."""

    capacity: int
    cache: PrefixCache | None
    claimed: int = 0

    @property
    def available(self) -> int:
        """The largest claim that would be met now."""
        left = self.capacity - self.claimed
        return left if self.cache is None else left - self.cache.nbytes + self.cache.evictable_bytes

    @property
    def free(self) -> int:
        """What neither claims nor the tree take."""
        return self.capacity - self.claimed - (0 if self.cache is None else self.cache.nbytes)

    def claim(self, nbytes: int) -> bool:
        """Take `nbytes`, evicting from the tree if need be; or refuse, without any effect."""
        if nbytes > self.available:
            return False
        self._set_claimed(self.claimed + nbytes)
        return True

    def claim_free(self, nbytes: int) -> bool:
        """Take `nbytes` of what is free, or refuse: the tree keeps what it has."""
        return nbytes <= self.free and self.claim(nbytes)

    def release(self, nbytes: int) -> None:
        assert 0 <= nbytes <= self.claimed
        self._set_claimed(self.claimed - nbytes)

    def _set_claimed(self, nbytes: int) -> None:
        if nbytes == self.claimed:
            return
        self.claimed = nbytes
        if self.cache is not None:
            self.cache.set_capacity(self.capacity - nbytes)
