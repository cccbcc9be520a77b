"""What a step returns: tokens, what it captured and moved between tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pippin.backends.base.plan import StepPlan
from pippin.cache.entries import Bytes
from pippin.types import Component, ModelSpec, Payload, StepForwards, TokenLogprobs


class Spilled(Protocol):
    """The bytes of one `Spill`, on the host or on their way there."""

    @property
    def intact(self) -> bool:
        """False: not what was captured or loaded once. Known when its step has been waited for."""
        ...

    def arrays(self) -> Sequence[Bytes]:
        """One for each of `Backend.payload_arrays`; from any thread, which waits for the copy."""
        ...

    def release(self) -> None:
        """Give the memory back; exactly once, from the thread that read it or the engine's."""
        ...


@dataclass(frozen=True)
class Capture:
    """What a plan asked to keep of one slot: tokens [start, end).

    `kv` holds the divisible components for exactly that range (absent for a state-only capture of
    a decode row); `states` maps a position in (start, end] to the recurrent state after it;
    `hidden` is what the head read after `end`, if that ends a prompt.
    """

    slot: int
    start: int
    end: int
    retired: bool = False  # from a Retire: the slot may already belong to another request
    kv: Mapping[Component, Payload] = field(default_factory=dict)
    states: Mapping[int, Payload] = field(default_factory=dict)
    hidden: Payload | None = None

    @property
    def nbytes(self) -> int:
        return sum(payload.nbytes for payload in self.payloads)

    @property
    def payloads(self) -> Sequence[Payload]:
        hidden = () if self.hidden is None else (self.hidden,)
        return [*self.kv.values(), *self.states.values(), *hidden]

    def release(self) -> None:
        """Give up all of it."""
        for payload in self.payloads:
            payload.release()


@dataclass(frozen=True)
class Damage:
    """What a slot was restored from is not what was captured or loaded: tokens [start, end) of KV,
    or what is kept after `end`.

    Reported with the first step that computes something from it, at the latest.
    """

    slot: int
    component: Component
    start: int
    end: int


@dataclass(frozen=True)
class StepResult:
    # By slot, for every row that samples: one token, and one more for each draft that it accepted.
    tokens: Mapping[int, tuple[int, ...]]
    # Of these tokens, by slot, if asked for.
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    captures: tuple[Capture, ...] = ()
    # Slots whose numbers are NaN. Nothing that a step computed for these is to be used, at earlier
    # positions neither: a masked weight of 0 times NaN is NaN.
    overflowed: frozenset[int] = frozenset()
    dispatched: float = 0.0  # time.perf_counter() when the device was handed the step
    forwards: StepForwards = field(default_factory=StepForwards)
    # float32 [n] by slot, of rows that sample after their prompt and whose Admit `embeds`.
    hidden: Mapping[int, np.ndarray] = field(default_factory=dict)
    spilled: tuple[Spilled, ...] = ()  # in the order of the plan's `spill`
    loaded: tuple[Payload, ...] = ()  # in the order of its `load`
    damaged: tuple[Damage, ...] = ()  # none where a backend keeps no fingerprints

    @property
    def num_accepted(self) -> int:
        """Drafts, of all rows."""
        return sum([len(tokens) - 1 for tokens in self.tokens.values()])


def captured_bytes(spec: ModelSpec, plan: StepPlan) -> int:
    """The captures that a plan asks for, where each is a copy of its own: `transient_bytes`."""
    per_token = spec.kv_bytes_per_token + spec.window_bytes_per_token
    total = 0
    for retire in plan.retire:
        if retire.captures:
            total += (retire.end - retire.start) * per_token + spec.state_bytes
    for chunk in plan.prefill:
        if chunk.captures:
            total += len(chunk.tokens) * per_token + len(chunk.checkpoints) * spec.state_bytes
            total += spec.hidden_bytes * chunk.samples
    for row in plan.decode:
        if row.checkpoint:
            total += spec.state_bytes
    return total + sum(loaded_bytes(spec, load.component, load.num_tokens) for load in plan.load)


def loaded_bytes(spec: ModelSpec, component: Component, num_tokens: int) -> int:
    """What a payload occupies on the device."""
    match component:
        case Component.ATTENTION:
            return num_tokens * spec.kv_bytes_per_token
        case Component.WINDOW:
            return num_tokens * spec.window_bytes_per_token
        case Component.STATE:
            return spec.state_bytes
    return spec.hidden_bytes
