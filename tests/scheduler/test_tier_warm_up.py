"""Warming up a tier's copies on a device that fails in any step of it."""

from __future__ import annotations

from itertools import count

import pytest

from cases import cases
from memory_store import MemoryStore
from pippin.backends.base import StepPlan, StepResult
from pippin.backends.fake import FakeBackend, FakePending
from pippin.cache.tiers.tier_io import PIECES_AHEAD, TierIO
from pippin.scheduler.traffic import TierWarmUp


class Failing(FakeBackend):
    """Fails in one step: before it, or after it has run."""

    def __init__(self, step: int, *, waits: bool) -> None:
        super().__init__(num_slots=4)
        self._fails_at = step
        self._waits = waits
        self.num_steps = 0

    def launch(self, plan: StepPlan) -> FakePending:
        fails, self.num_steps = self.num_steps == self._fails_at, self.num_steps + 1
        if fails and not self._waits:
            raise RuntimeError("out of memory")
        pending = super().launch(plan)
        finish = pending.wait

        def wait() -> StepResult:
            finish()
            raise RuntimeError("the device was lost")

        if fails:
            pending.wait = wait  # type: ignore[method-assign]
        return pending


@cases("waits", [False, True], ids=["launch", "wait"])
@cases("step", range(10))
def test_copies_that_fail_leave_nothing_on_the_device(step: int, waits: bool) -> None:
    """There are nine steps: the last of these fails in none."""
    backend = Failing(step, waits=waits)
    tier_io = TierIO(MemoryStore(b"toy", 1 << 20), piece_bytes=1 << 10)
    warm_up = TierWarmUp(backend, tier_io, batch_bytes=64 << 10)
    if step < 9:
        with pytest.raises(RuntimeError, match=r"memory|lost"):
            warm_up.run(count(), lambda _: True)
    else:
        warm_up.run(count(), lambda _: True)
        assert backend.num_steps == 9
    assert backend.ledger.nbytes == 0
    assert len(tier_io.buffers._idle) == PIECES_AHEAD
    tier_io.close()
