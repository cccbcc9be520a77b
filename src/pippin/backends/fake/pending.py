"""A step of the toy in flight: its result is there when the toy device has run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from pippin.backends.base import Capture, Damage, Restore, StepResult
from pippin.backends.fake.device import FakeDevice
from pippin.backends.fake.payloads import FakePayload, as_fake
from pippin.backends.step_outputs import StepOutputs
from pippin.types import TokenLogprobs


@dataclass
class FakePending(StepOutputs):
    device_queue: FakeDevice = field(kw_only=True)
    sample_masked: Callable[[FakePending], None] = field(kw_only=True)
    score: Callable[[int, int], TokenLogprobs] = field(kw_only=True)  # of a token, and how many top
    checkpoints: dict[int, FakePayload] = field(default_factory=dict)  # of decode rows, by slot
    captured_at: dict[int, int] = field(default_factory=dict)  # their lengths, once they have run
    damaged: list[Damage] = field(default_factory=list)
    masks: dict[int, np.ndarray] | None = None  # by slot, once they are known

    def check(self, slot: int, restore: Restore) -> None:
        """Report payloads whose content is not what the device wrote."""
        for component, start, end, payload in restore.placed():
            if not as_fake((payload,))[0].intact:
                self.damaged.append(Damage(slot, component, start, end))

    def dispatch(self) -> None:
        """`launch` has enqueued everything."""

    def sample(self, masks: np.ndarray) -> None:
        assert self.masks is None, "masked rows are sampled once"
        self.masks = dict(zip(self.plan.masked_slots, masks, strict=True))
        self.device_queue.enqueue(self.plan.step, lambda: self.sample_masked(self))

    def discard(self) -> None:
        super().discard()
        for state in self.checkpoints.values():
            state.release()

    def done(self) -> bool:
        sampled = self.masks is not None or not self.plan.masked_slots
        return sampled and self.device_queue.done_step >= self.plan.step

    def wait(self) -> StepResult:
        self.device_queue.run_until(self.plan.step)
        for slot, tokens in self.tokens.items():
            num_top = self.num_top_logprobs(slot)
            if num_top is not None:
                self.logprobs[slot] = tuple(self.score(token, num_top) for token in tokens)
        for slot, state in self.checkpoints.items():
            at = self.captured_at[slot]
            self.captures.append(Capture(slot, at - 1, at, states={at: state}))
        self.checkpoints = {}
        return replace(self.result(), damaged=tuple(self.damaged))
