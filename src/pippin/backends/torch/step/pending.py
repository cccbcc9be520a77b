"""A step in flight on torch: what it has yet to sample, and what it will return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pippin.backends.base import Restore, StepResult
from pippin.backends.sampling.sampler import SampleRow
from pippin.backends.step_outputs import StepOutputs
from pippin.backends.torch.pools.fingerprints import Compared, TorchFingerprints
from pippin.backends.torch.pools.payloads import StatePayload
from pippin.backends.torch.streams import Arrival


@dataclass(kw_only=True)
class TorchPending(StepOutputs):
    sample_masked: Callable[[TorchPending, np.ndarray], None]  # with masks of `masked`
    fingerprints: TorchFingerprints | None = None
    # What is restored or spilled, and what to call if it is not what it was.
    compared: list[Compared] = field(default_factory=list)
    masked: list[tuple[SampleRow, torch.Tensor]] = field(default_factory=list)  # with their logits
    # By slot, states whose positions are known with the result: then they are captures.
    checkpoints: dict[int, StatePayload] = field(default_factory=dict)

    def dispatch(self) -> None:
        """Its launches hold nothing back."""

    def sample(self, masks: np.ndarray) -> None:
        assert self.masked, "this plan has no masked rows, or they were sampled before"
        self.sample_masked(self, self.masks_of([row.slot for row, _ in self.masked], masks))
        self.masked = []

    def discard(self) -> None:
        super().discard()
        for state in self.checkpoints.values():
            state.release()
        self.checkpoints = {}

    def wait(self) -> StepResult:
        self.read_all()
        return self.result()

    def check_restored(self, slot: int, restore: Restore) -> None:
        """Have what a row is restored from compared with what it was."""
        if self.fingerprints is not None:
            self.compared += self.fingerprints.of_restored(slot, restore)

    def read_later(self, arrival: Arrival, read: Callable[..., None]) -> None:
        """With the tensors that arrive."""
        self.reads.append(lambda: read(*arrival.wait()))

    def read_hidden(self, slots: Sequence[int], hidden: torch.Tensor) -> None:
        self.hidden |= zip(slots, hidden.numpy().copy(), strict=True)

    def read_drawn(self, slots: Sequence[int], sampled: Sequence[int], drawn: torch.Tensor) -> None:
        """drawn, int32 [2, rows]: tokens, of which those of `sampled` count, and overflows."""
        counted = set(sampled)
        self.read_tokens([slot if slot in counted else 0 for slot in slots], drawn[0])
        self.read_overflows(slots, drawn[1])
