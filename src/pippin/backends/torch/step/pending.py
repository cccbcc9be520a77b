"""A step in flight: what it has yet to sample, and what it will tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pippin.backends.base import Capture, Restore, StepPlan, StepResult
from pippin.backends.torch.pools.fingerprints import Fingerprints
from pippin.backends.torch.pools.transfers import TorchSpilled
from pippin.backends.torch.step.sampler import SampleRow
from pippin.backends.torch.streams import Arrival
from pippin.types import Payload, StepForwards, TokenLogprobs


@dataclass(frozen=True)
class Told:
    """Results on their way to the host, and how to read them."""

    arrival: Arrival
    read: Callable[[list[torch.Tensor]], None]


@dataclass
class TorchPending:
    plan: StepPlan
    sample_masked: Callable[[TorchPending, np.ndarray], None]  # with masks of `masked`
    num_top_logprobs: Callable[[int], int | None]  # by slot
    fingerprints: Fingerprints | None = None  # None: nobody takes any
    captures: list[Capture] = field(default_factory=list)
    spilled: list[TorchSpilled] = field(default_factory=list)
    loaded: list[Payload] = field(default_factory=list)
    masked: list[tuple[SampleRow, torch.Tensor]] = field(default_factory=list)  # with their logits
    told: list[Told] = field(default_factory=list)
    dispatched: float = 0.0
    forwards: StepForwards = field(default_factory=StepForwards)
    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    overflowed: set[int] = field(default_factory=set)
    hidden: dict[int, np.ndarray] = field(default_factory=dict)  # float32 [n], by slot: embeddings

    def dispatch(self) -> None:
        """Its launches hold nothing back."""

    def sample(self, masks: np.ndarray) -> None:
        assert self.masked, "this plan has no masked rows, or they were sampled before"
        lines = {slot: number for number, slot in enumerate(self.plan.masked_slots)}
        self.sample_masked(self, masks[[lines[row.slot] for row, _ in self.masked]])
        self.masked = []

    def wait(self) -> StepResult:
        for told in self.told:
            told.read(told.arrival.wait())
        self.told = []
        return StepResult(
            self.tokens,
            self.logprobs,
            {slot: tuple(found) for slot, found in self.prompt_logprobs.items()},
            tuple(self.captures),
            frozenset(self.overflowed),
            dispatched=self.dispatched,
            forwards=self.forwards,
            hidden=self.hidden,
            spilled=tuple(self.spilled),
            loaded=tuple(self.loaded),
            damaged=() if self.fingerprints is None else self.fingerprints.read(self.plan.step),
        )

    def check_restored(self, restored: Iterable[tuple[int, Restore]]) -> None:
        """Have what rows are restored from compared with what it was."""
        if self.fingerprints is not None:
            self.fingerprints.compare_restored(self.plan.step, restored)

    def discard(self) -> None:
        if self.fingerprints is not None:
            self.fingerprints.forget(self.plan.step)
        for capture in self.captures:
            capture.release()
        for spilled in self.spilled:
            spilled.release()
        for payload in self.loaded:
            payload.release()
        self.captures, self.spilled, self.loaded = [], [], []

    # ---- what arrives ----------------------------------------------------------------------

    def read_tokens(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        self.tokens |= zip(slots, tokens.tolist(), strict=True)

    def read_hidden(self, slots: Sequence[int], hidden: torch.Tensor) -> None:
        self.hidden |= zip(slots, hidden.numpy().copy(), strict=True)

    def read_overflows(self, slots: Sequence[int], overflowed: torch.Tensor) -> None:
        flags = zip(slots, overflowed.tolist(), strict=True)
        self.overflowed |= {slot for slot, is_none in flags if is_none}

    def read_drawn(self, slots: Sequence[int], sampled: Sequence[int], told: torch.Tensor) -> None:
        """told, int32 [2, rows]: tokens, of which those of `sampled` count, and overflows."""
        tokens = dict(zip(slots, told[0].tolist(), strict=True))
        self.tokens |= {slot: tokens[slot] for slot in sampled}
        self.read_overflows(slots, told[1])

    def read_logprobs(self, slots: Sequence[int], *found: torch.Tensor) -> None:
        for slot, line in zip(slots, lines_of(*found), strict=True):
            top = self.num_top_logprobs(slot)
            if top is not None:
                self.logprobs[slot] = TokenLogprobs(
                    line.logprob, line.top_ids[:top], line.top_logprobs[:top]
                )


def lines_of(*logprobs: torch.Tensor) -> Iterator[TokenLogprobs]:
    """The arrays of `Logprobs`, as they arrived."""
    chosen, ids, tops = (array.tolist() for array in logprobs)
    for value, line_ids, line_tops in zip(chosen, ids, tops, strict=True):
        yield TokenLogprobs(value, tuple(line_ids), tuple(line_tops))
