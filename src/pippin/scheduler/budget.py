"""How many bytes running requests and the tree may hold together. Knows no arrays and no queue."""

from __future__ import annotations

from dataclasses import dataclass

from pippin.cache.prefix_cache import PrefixCache
from pippin.scheduler.request import Request
from pippin.types import GRID, ModelSpec

GROWTH_TOKENS = 256  # a running request's reservation grows by this much at a time


@dataclass
class ByteBudget:
    """One budget over working rows and the tree; weights are already taken off `capacity`."""

    spec: ModelSpec
    capacity: int
    cache: PrefixCache | None
    reserved: int = 0

    def row_bytes(self, num_tokens: int) -> int:
        """What one running request of `num_tokens` occupies, rows and transients together."""
        spec = self.spec
        windowed = min(num_tokens, spec.window + GRID) * spec.window_bytes_per_token
        tokens = -(-num_tokens // GRID) * GRID + GRID  # padded main and the tail
        return tokens * spec.kv_bytes_per_token + windowed + 2 * spec.state_bytes

    def could_reserve(self, request: Request, num_tokens: int) -> bool:
        """Whether the reservation would fit beside the other running requests, tree aside."""
        extra = self.row_bytes(num_tokens) - request.reserved_bytes
        return extra <= self.capacity - self.reserved

    def try_reserve(self, request: Request, num_tokens: int) -> bool:
        """Grow the request's reservation to `num_tokens`, evicting from the tree if need be."""
        extra = self.row_bytes(num_tokens) - request.reserved_bytes
        if extra <= 0:
            return True
        if not self.could_reserve(request, num_tokens):
            return False
        left_for_cache = self.capacity - self.reserved - extra
        if self.cache is not None:
            excess = self.cache.nbytes - left_for_cache
            if excess > 0:
                self.cache.evict(excess)
                if self.cache.nbytes > left_for_cache:
                    return False
            self.cache.set_capacity(left_for_cache)
        self.reserved += extra
        request.reserved_bytes += extra
        request.reserved_tokens = num_tokens
        return True

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Reserve for a reply of `num_tokens` and some more, or failing that just for it."""
        ahead = min(request.max_total, num_tokens + GROWTH_TOKENS)
        return self.try_reserve(request, ahead) or self.try_reserve(request, num_tokens)

    def release(self, request: Request) -> None:
        self.reserved -= request.reserved_bytes
        request.reserved_bytes = 0
        if self.cache is not None:
            self.cache.set_capacity(self.capacity - self.reserved)
