"""A step in flight: what it has yet to sample, what arrives on the host, and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol

import numpy as np

from pippin.backends.base import Capture, Restore, Spill, Spilled, StepPlan, StepResult
from pippin.backends.sampling.batches import A
from pippin.backends.sampling.sampler import Sampled, SampleRow
from pippin.backends.step.fingerprints import Fingerprints
from pippin.backends.step.slots import Arrays, FutureMap, SlotTable
from pippin.cache.entries import Bytes
from pippin.types import Component, Payload, StepForwards, TokenLogprobs


class Listed(Protocol):
    """An array on the host, of any library."""

    def tolist(self) -> Any: ...


class Arrival(Protocol):
    """Arrays on their way to the host."""

    def wait(self) -> Sequence[Any]:
        """They are there, whatever the device has yet to do of later steps."""
        ...


@dataclass(frozen=True)
class Evaluated:
    """Arrays that are read from their own buffers, which is no new device work."""

    arrays: Sequence[Any]

    def wait(self) -> Sequence[np.ndarray]:
        return [np.asarray(array) for array in self.arrays]


class SpilledArrays:
    """Arrays of uint8 that a step writes."""

    def __init__(self, arrival: Arrival) -> None:
        self._arrival: Arrival | None = arrival
        self.intact = True

    def arrays(self) -> Sequence[Bytes]:
        assert self._arrival is not None, "read after its release"
        return [np.asarray(found).reshape(-1) for found in self._arrival.wait()]

    def note_damage(self) -> None:
        self.intact = False

    def release(self) -> None:
        assert self._arrival is not None, "released twice"
        self._arrival = None


@dataclass(frozen=True)
class Sampling(Generic[A]):
    """Rows of logits to tokens in the future map, and on their way to the host."""

    arrays: Arrays[A]
    slots: SlotTable[A]
    future: FutureMap[A]

    def sample(
        self, step: Pending[A], rows: Sequence[SampleRow], logits: A, masks: np.ndarray | None
    ) -> None:
        sampled = self.slots.sampler.sample(logits, rows, masks)
        slots = np.array([row.slot for row in rows])
        self.future.stash(self.arrays.index(slots), sampled.tokens)
        self.future.note_written(slots)
        step.samples = True
        owners = slots.tolist()
        step.read_later(step.bring([sampled.tokens]), partial(step.read_tokens, owners))
        step.bring_logprobs(owners, sampled)
        step.note_made([*sampled.arrays, *self.future.arrays()])


@dataclass(kw_only=True)
class StepOutputs(ABC):
    """What a step will return."""

    plan: StepPlan
    fingerprints: Fingerprints[Any] | None = None  # None: they are off
    captures: list[Capture] = field(default_factory=list)
    # By slot, states whose positions are known with the result: then they are captures.
    checkpoints: dict[int, Payload] = field(default_factory=dict)
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

    @abstractmethod
    def bring(self, arrays: Sequence[Any]) -> Arrival:
        """To the host: arrays that no later step writes."""

    def keep(self, capture: Capture) -> None:
        self.captures.append(capture)

    def load(self, payload: Payload) -> None:
        self.loaded.append(payload)

    def spill(self, spill: Spill, arrays: Sequence[Any]) -> None:
        """`arrays`: of uint8, of its payloads."""
        spilled = SpilledArrays(self.bring(arrays))
        self.spilled.append(spilled)
        if self.fingerprints is not None:
            for payload in spill.payloads:
                self.fingerprints.compare(payload, spilled.note_damage)

    def read_all(self) -> None:
        for read in self.reads:
            read()
        self.reads = []

    def result(self) -> StepResult:
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

    def discard(self) -> None:
        if self.fingerprints is not None:
            self.fingerprints.forget(self.plan.step)
        states = self.checkpoints.values()
        outputs: list[Capture | Spilled | Payload] = [*self.captures, *self.spilled, *self.loaded]
        for output in (*outputs, *states):
            output.release()
        self.captures, self.spilled, self.loaded, self.reads = [], [], [], []
        self.checkpoints = {}

    def keep_checkpoint(self, slot: int, end: int) -> None:
        """Its state is that at `end`, which is known now."""
        if (state := self.checkpoints.pop(slot, None)) is not None:
            self.captures.append(Capture(slot, end - 1, end, states={end: state}))


Parts = list[tuple[Sequence[SampleRow], A]]  # rows with their logits [n, vocab]


@dataclass(kw_only=True)
class Pending(StepOutputs, Generic[A]):
    sampling: Sampling[A]
    to_sample: Parts[A] = field(default_factory=list)
    masked: Parts[A] = field(default_factory=list)  # they wait for the host
    samples: bool = False

    def note_made(self, arrays: Sequence[A]) -> None:
        """What the step has to compute beside what it brings, where arrays are lazy."""

    def dispatch(self) -> None:
        """Submit what is held back: nothing, where launches hold nothing back."""

    def wait(self) -> StepResult:
        self.read_all()
        return self.result()

    def check_restored(
        self,
        slot: int,
        restore: Restore | None,
        components: Collection[Component] = tuple(Component),
        *,
        later: bool = False,
    ) -> None:
        """Have what a row is restored from compared with what it was. `later`: not before the
        next step is computed from it."""
        if self.fingerprints is not None and restore is not None:
            self.fingerprints.compare_restored(slot, restore, components, later=later)

    # ---- sampling --------------------------------------------------------------------------

    def add_to_sample(self, rows: Sequence[SampleRow], logits: A, *, masked: bool) -> None:
        if any(row.slot for row in rows):
            (self.masked if masked else self.to_sample).append((rows, logits))

    def sample_added(self) -> None:
        """What needs no mask."""
        parts, self.to_sample = self.to_sample, []
        if parts:
            self.sampling.sample(self, *self._joined(parts), None)

    def sample(self, masks: np.ndarray) -> None:
        parts, self.masked = self.masked, []
        assert parts, "this plan has no masked rows, or they were sampled before"
        rows, logits = self._joined(parts)
        lines = {slot: number for number, slot in enumerate(self.plan.masked_slots)}
        # In the order of these rows; any of them for padding.
        ordered = masks[[lines[row.slot] if row.slot else 0 for row in rows]]
        self.sampling.sample(self, rows, logits, ordered)

    def _joined(self, parts: Parts[A]) -> tuple[Sequence[SampleRow], A]:
        logits = [part for _, part in parts]
        joined = logits[0] if len(logits) == 1 else self.sampling.arrays.join(logits)
        return [row for rows, _ in parts for row in rows], joined

    # ---- what arrives; slot 0 is padding ---------------------------------------------------

    def read_later(self, arrival: Arrival, read: Callable[..., None]) -> None:
        """With the arrays that arrive."""
        self.reads.append(lambda: read(*arrival.wait()))

    def check(self, slots: Sequence[int], logits: Any) -> None:
        """Note rows of logits [rows, vocab] that are not numbers: then none of a row's is one."""
        first = logits[:, 0]
        self.read_later(self.bring([first != first]), partial(self.read_overflows, slots))

    def bring_logprobs(self, slots: Sequence[int], sampled: Sampled[A]) -> None:
        if sampled.logprobs is not None:
            asked = [slots[row] for row in sampled.asked]
            self.read_later(self.bring(sampled.logprobs), partial(self.read_logprobs, asked))

    def bring_hidden(self, slots: Sequence[int], hidden: A) -> None:
        """float32 [slots, n]"""

        def read(found: Any) -> None:
            self.hidden |= zip(slots, np.asarray(found).copy(), strict=True)

        self.read_later(self.bring([hidden]), read)

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
            top = self.sampling.slots.num_top_logprobs(slot) if slot else None
            if top is not None:
                ids, logprobs = line.top_ids[:top], line.top_logprobs[:top]
                self.logprobs[slot] = (TokenLogprobs(line.logprob, ids, logprobs),)

    def read_prompt_logprobs(self, slot: int, *found: Listed) -> None:
        self.prompt_logprobs[slot].extend(_token_logprobs(*found))


def _token_logprobs(chosen: Listed, ids: Listed, tops: Listed) -> Iterator[TokenLogprobs]:
    lists = (chosen.tolist(), ids.tolist(), tops.tolist())
    for value, line_ids, line_tops in zip(*lists, strict=True):
        yield TokenLogprobs(value, tuple(line_ids), tuple(line_tops))
