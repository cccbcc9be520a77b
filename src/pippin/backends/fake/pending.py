"""A step of the toy under way: what it will tell once the toy device has come so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import numpy as np

from pippin.backends.base import Capture, Damage, StepPlan, StepResult
from pippin.backends.fake import transfers
from pippin.backends.fake.device import FakeDevice
from pippin.backends.fake.payloads import FakePayload
from pippin.types import TokenLogprobs


class Sampling(Protocol):
    """What a step wants of its backend."""

    device_queue: FakeDevice

    def sample_masked(self, pending: FakePending) -> None: ...

    def logprobs(self, tokens: Mapping[int, int]) -> dict[int, TokenLogprobs]: ...


@dataclass
class FakePending:
    backend: Sampling
    plan: StepPlan
    tokens: dict[int, int] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    hidden: dict[int, np.ndarray] = field(default_factory=dict)
    captures: list[Capture] = field(default_factory=list)
    spilled: list[transfers.FakeSpilled] = field(default_factory=list)
    loaded: list[FakePayload] = field(default_factory=list)
    damaged: list[Damage] = field(default_factory=list)
    masks: dict[int, np.ndarray] | None = None  # by slot, once they are known
    dispatched: float = field(default_factory=perf_counter)

    def dispatch(self) -> None:
        """Its launches hold nothing back."""

    def sample(self, masks: np.ndarray) -> None:
        assert self.masks is None, "masked rows are sampled once"
        self.masks = dict(zip(self.plan.masked_slots, masks, strict=True))
        device = self.backend.device_queue
        device.enqueue(self.plan.step, lambda: self.backend.sample_masked(self))

    def done(self) -> bool:
        sampled = self.masks is not None or not self.plan.masked_slots
        return sampled and self.backend.device_queue.done_step >= self.plan.step

    def wait(self) -> StepResult:
        self.backend.device_queue.run_until(self.plan.step)
        return StepResult(
            tokens=self.tokens,
            logprobs=self.backend.logprobs(self.tokens),
            prompt_logprobs=self.prompt_logprobs,
            hidden=self.hidden,
            captures=tuple(self.captures),
            dispatched=self.dispatched,
            spilled=tuple(self.spilled),
            loaded=tuple(self.loaded),
            damaged=tuple(self.damaged),
        )

    def discard(self) -> None:
        for capture in self.captures:
            capture.release()
        for spilled in self.spilled:
            spilled.release()
        for payload in self.loaded:
            payload.release()
        self.captures, self.spilled, self.loaded = [], [], []
