"""A queued request that could start, and before which others. Knows no queue and no bytes."""

from __future__ import annotations

import msgspec

from pippin.scheduler.request import Request

MAX_PASSED_OVER = 8


class Offer(msgspec.Struct, frozen=True, gc=False):  # many for each request that starts
    request: Request
    matched: int  # tokens that the tree seemed to hold when it was last asked

    @property
    def num_to_compute(self) -> int:
        return self.request.num_tokens - self.matched

    @property
    def is_firm(self) -> bool:
        """It may not be passed over any more."""
        request = self.request
        return request.num_preemptions > 0 or request.passed_over >= MAX_PASSED_OVER

    @property
    def order(self) -> tuple[int, int, int]:
        request = self.request
        if self.is_firm:
            return -request.priority, 0, request.arrival
        return -request.priority, 1, self.num_to_compute
