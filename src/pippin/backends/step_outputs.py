"""What a launched step will return, as arrays of any backend arrive. Knows no device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pippin.backends.base import Capture, Spilled, StepPlan, StepResult
from pippin.backends.fingerprint_reads import FingerprintReads
from pippin.types import DeviceReading, Payload, StepForwards, TokenLogprobs


class Listed(Protocol):
    """An array on the host, of any library."""

    def tolist(self) -> Any: ...


@dataclass
class StepOutputs:
    plan: StepPlan
    num_top_logprobs: Callable[[int], int | None]  # by slot
    fingerprints: FingerprintReads | None = None  # None: they are off
    captures: list[Capture] = field(default_factory=list)
    spilled: list[Spilled] = field(default_factory=list)
    loaded: list[Payload] = field(default_factory=list)
    reads: list[Callable[[], None]] = field(default_factory=list)  # each waits for its arrays
    dispatched: float = 0.0
    forwards: StepForwards = field(default_factory=StepForwards)
    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    overflowed: set[int] = field(default_factory=set)
    hidden: dict[int, np.ndarray] = field(default_factory=dict)  # float32 [n], by slot: embeddings

    def read_all(self) -> None:
        for read in self.reads:
            read()
        self.reads = []

    def result(self, device: DeviceReading | None = None) -> StepResult:
        return StepResult(
            self.tokens,
            self.logprobs,
            {slot: tuple(found) for slot, found in self.prompt_logprobs.items()},
            tuple(self.captures),
            frozenset(self.overflowed),
            dispatched=self.dispatched,
            device=device,
            forwards=self.forwards,
            hidden=self.hidden,
            spilled=tuple(self.spilled),
            loaded=tuple(self.loaded),
            damaged=() if self.fingerprints is None else self.fingerprints.read(self.plan.step),
        )

    def discard(self) -> None:
        if self.fingerprints is not None:
            self.fingerprints.forget(self.plan.step)
        outputs: list[Capture | Spilled | Payload] = [*self.captures, *self.spilled, *self.loaded]
        for output in outputs:
            output.release()
        self.captures, self.spilled, self.loaded, self.reads = [], [], [], []

    def masks_of(self, slots: Sequence[int], masks: np.ndarray) -> np.ndarray:
        """The plan's masks, in the order of these slots; any of them for padding."""
        lines = {slot: number for number, slot in enumerate(self.plan.masked_slots)}
        ordered: np.ndarray = masks[[lines[slot] if slot else 0 for slot in slots]]
        return ordered

    # ---- what arrives; slot 0 is padding ---------------------------------------------------

    def read_tokens(self, slots: Sequence[int], tokens: Listed) -> None:
        pairs = zip(slots, tokens.tolist(), strict=True)
        self.tokens |= {slot: (token,) for slot, token in pairs if slot}

    def read_accepted(self, slots: Sequence[int], tokens: Listed, counts: Listed) -> None:
        """Of each row its first token, and as many behind it as it accepted drafts."""
        rows = zip(slots, tokens.tolist(), counts.tolist(), strict=True)
        self.tokens |= {slot: tuple(line[: count + 1]) for slot, line, count in rows if slot}

    def read_overflows(self, slots: Sequence[int], overflowed: Listed) -> None:
        flags = zip(slots, overflowed.tolist(), strict=True)
        self.overflowed |= {slot for slot, is_nan in flags if slot and is_nan}

    def read_logprobs(self, slots: Sequence[int], *found: Listed) -> None:
        for slot, line in zip(slots, _token_logprobs(*found), strict=True):
            top = self.num_top_logprobs(slot) if slot else None
            if top is not None:
                ids, logprobs = line.top_ids[:top], line.top_logprobs[:top]
                self.logprobs[slot] = (TokenLogprobs(line.logprob, ids, logprobs),)

    def read_prompt_logprobs(self, slot: int, *found: Listed) -> None:
        self.prompt_logprobs[slot].extend(_token_logprobs(*found))


def _token_logprobs(chosen: Listed, ids: Listed, tops: Listed) -> Iterator[TokenLogprobs]:
    lists = (chosen.tolist(), ids.tolist(), tops.tolist())
    for value, line_ids, line_tops in zip(*lists, strict=True):
        yield TokenLogprobs(value, tuple(line_ids), tuple(line_tops))
