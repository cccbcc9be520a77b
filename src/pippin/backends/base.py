"""The contract between the scheduler and whatever runs the model. Knows no arrays.

A plan carries every device-side effect of a step, and a backend executes it in this order:

    retire   read what rows hold after the previous launch (captures), then free their slots
    admit    sampling parameters of slots that start
    decode   run one token of each row (from the FutureMap), sample, stash the token by slot
    prefill  restore a matched prefix, then run chunks of prompts, and of replies whose next tokens
             are known; sample where one ends, or at once where all of a prompt was restored with
             its hidden vector
    spill    read payloads of the tree as bytes, on their way to another tier
    load     make payloads of bytes that came from there

Decode and prefill concern different slots: either may come first, but streams wait for theirs.
Rows that obey a grammar are sampled when the host has made their masks: `PendingStep.sample`.
Only `Backend.launch` touches the device, so no schedule-versus-forward race can be written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import msgspec
import numpy as np

from pippin.cache.disk.entries import ArraySpec, Bytes
from pippin.types import (
    Component,
    DeviceReading,
    ModelSpec,
    Payload,
    SamplingParams,
    StepForwards,
    TokenLogprobs,
)


@dataclass(frozen=True)
class DeviceInfo:
    """What a backend computes on, and what suits it where the user does not say."""

    kind: Literal["metal", "cuda", "cpu", "fake"]
    name: str
    memory_bytes: int  # what one process can reasonably hold
    share: float  # of `memory_bytes` to use
    prefill_tokens: int  # of a step: enough that products, not launches, take the time
    max_buffers: int | None = None  # that one process can have, where that is limited


@dataclass(frozen=True)
class Restore:
    """A prefix matched in the tree: `length` tokens that need not be computed.

    KV payloads are in token order and end at `length`; window payloads cover at least the last
    window; a state, and a hidden vector where one is kept, are those after `length`. The payloads
    are borrowed, and a lock keeps them in the tree: until the step that restores them has been
    committed where a backend copies them into the row, and as long as the row lives where it
    restores by reference (`Backend.restores_by_reference`).
    """

    length: int
    payloads: Mapping[Component, tuple[Payload, ...]]


@dataclass(frozen=True)
class Admit:
    """A slot starts its life with these parameters."""

    slot: int
    params: SamplingParams
    stop_ids: tuple[int, ...]  # eos and the user's own; suppressed until min_tokens
    prompt: np.ndarray  # int32 [prompt_len]: what penalties look back at
    seed: int  # always set: the request's own or one drawn for it
    # int32 [n]: tokens that were sampled before the request was retracted. Its chunks run them
    # after the prompt; the next sample is the reply's token number n, and penalties count these.
    reply: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    embeds: bool = False  # tell the hidden vector after the prompt, with the token that is sampled


@dataclass(frozen=True)
class PrefillRow:
    """One chunk of one prompt: tokens at positions [start, start + len(tokens)).

    Without tokens, all of the prompt is restored with its hidden vector, and the row samples.

    A slot that decodes may have a chunk too, of tokens of its reply that a grammar forces. It
    begins with the token that the slot sampled last, samples, and the slot goes on decoding.
    """

    slot: int
    start: int
    tokens: np.ndarray  # int32 [n]
    samples: bool = False  # the chunk ends what is known of the request: sample its next token
    restore: Restore | None = None  # only on the first chunk
    checkpoints: tuple[int, ...] = ()  # ascending positions in (start, end]: capture states there
    # Hand this chunk's KV, states at checkpoints and, where it samples, its last hidden vector to
    # the tree.
    captures: bool = False
    masked: bool = False  # its first token is sampled by `PendingStep.sample`

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class DecodeRow(msgspec.Struct, frozen=True, gc=False):  # one per request and step: must be cheap
    """One token of one running request; the token itself is in the FutureMap under `slot`."""

    slot: int
    position: int  # of the input token: the number of tokens held before this step
    samples: bool = True  # False: absorb the last token of a finished reply for the cache
    checkpoint: bool = False  # capture the recurrent state after this step, at position + 1
    masked: bool = False  # a grammar row: sampled by `PendingStep.sample` once its mask is known

    @property
    def end(self) -> int:
        return self.position + 1


@dataclass(frozen=True)
class Retire:
    """A slot ends. With `captures`, the KV of positions [start, end) and the state at `end`.

    Without `captures` the slot may hold nothing: the launch that would have admitted it failed.
    """

    slot: int
    start: int = 0
    end: int = 0
    captures: bool = False


@dataclass(frozen=True)
class Spill:
    """Read consecutive payloads of one component, which the tree has held since before this step.

    Borrowed until `launch` returns: what a backend reads later it keeps by itself.
    """

    component: Component
    payloads: tuple[Payload, ...]


class Spilled(Protocol):
    """The bytes of one `Spill`, on the host or on their way there."""

    def arrays(self) -> Sequence[Bytes]:
        """One for each of `Backend.payload_arrays`; from any thread, which waits for the copy."""
        ...

    def release(self) -> None:
        """Give the memory back; exactly once, from the thread that read it or the engine's."""
        ...


@dataclass(frozen=True)
class Load:
    """Make one payload of bytes, in the arrays of `Backend.payload_arrays`.

    They stay as they are until the step has been committed, or is known to have failed.
    """

    component: Component
    num_tokens: int  # 1 for a state or a hidden vector
    arrays: tuple[Bytes, ...]


@dataclass(frozen=True)
class StepPlan:
    step: int
    retire: tuple[Retire, ...] = ()
    admit: tuple[Admit, ...] = ()
    prefill: tuple[PrefillRow, ...] = ()
    decode: tuple[DecodeRow, ...] = ()
    spill: tuple[Spill, ...] = ()
    load: tuple[Load, ...] = ()

    @property
    def rows(self) -> tuple[PrefillRow | DecodeRow, ...]:
        return (*self.prefill, *self.decode)

    @cached_property
    def sampled_rows(self) -> tuple[PrefillRow | DecodeRow, ...]:
        """Rows that get a token in this step: chunks that end what is known, then decodes."""
        return tuple([row for row in self.rows if row.samples])

    @cached_property
    def masked_rows(self) -> tuple[PrefillRow | DecodeRow, ...]:
        """Rows whose token is sampled by `PendingStep.sample`, in row order."""
        return tuple([row for row in self.rows if row.masked and row.samples])

    @property
    def masked_slots(self) -> tuple[int, ...]:
        return tuple([row.slot for row in self.masked_rows])

    @cached_property
    def num_prefill_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.prefill)

    @property
    def samples_at_once(self) -> bool:
        """Its tokens take no forward: every prompt in it is restored whole, and nobody decodes."""
        return bool(self.prefill) and not self.decode and not self.num_prefill_tokens

    @property
    def empty(self) -> bool:
        return not (
            self.retire or self.admit or self.prefill or self.decode or self.spill or self.load
        )


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
class StepResult:
    tokens: Mapping[int, int]  # sampled token by slot, for every row that samples
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)  # by slot, if asked for
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    captures: tuple[Capture, ...] = ()
    # Slots whose numbers are none any more (NaN). Whatever a step computed for one of these,
    # before that position too, is not to be used: a masked weight of 0 times NaN is NaN.
    overflowed: frozenset[int] = frozenset()
    dispatched: float = 0.0  # time.perf_counter() when the device was handed the step
    device: DeviceReading | None = None  # where a device keeps account of its work
    forwards: StepForwards = field(default_factory=StepForwards)
    # float32 [n] by slot, of rows that sample after their prompt and whose Admit `embeds`.
    hidden: Mapping[int, np.ndarray] = field(default_factory=dict)
    spilled: tuple[Spilled, ...] = ()  # in the order of the plan's `spill`
    loaded: tuple[Payload, ...] = ()  # in the order of its `load`


class PendingStep(Protocol):
    def dispatch(self) -> None:
        """Hand the device what `launch` may have held back, if it has not been done.

        A backend whose device holds the host up may build what prompts need and hand over only what
        running streams need: the tokens of the step before then reach their clients first. Called
        before the next plan is made; `wait` does it too.
        """
        ...

    def sample(self, masks: np.ndarray) -> None:
        """Launch sampling of the plan's masked rows, among what their masks allow.

        `masks`: int32 [masked rows, words], packed (`backends/masks.py`), in the order of
        `StepPlan.masked_rows`. Must be called exactly once when a plan has such rows, before
        `wait`.
        """
        ...

    def wait(self) -> StepResult:
        """The only call that waits for results: this step's tokens, nothing of a later step."""
        ...

    def discard(self) -> None:
        """Release what the step captured, spilled and loaded: nobody will take it.

        Called instead of `wait`, or after it raised; at most once. The rows stay as they are.
        """
        ...


class Costs(Protocol):
    """What a backend says of bytes; whoever plans adds them up. Asking has no effect."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def restores_by_reference(self) -> bool:
        """Whether a restored row reads the tree's own payloads instead of a copy of them."""
        ...

    def row_bytes(self, num_tokens: int, num_borrowed: int = 0) -> int:
        """What a row of `num_tokens` occupies at most, its share of moving rows about included.

        The first `num_borrowed` of them were restored: a backend that restores by reference does
        not count them again. Grows with `num_tokens`.
        """
        ...

    def transient_bytes(self, plan: StepPlan) -> int:
        """What a launched plan holds beside rows and tree until it is committed: its captures, and
        what it loads.

        A sum over the plan's rows and loads, so that a scheduler may ask for each alone.
        Activations are not in it: `limit_memory` sets them aside.
        """
        ...


@dataclass(frozen=True)
class WarmUpShape:
    """What a step's cost depends on where a device has to see a shape first (warm_up.py)."""

    num_rows: int
    num_tokens: int  # of a chunk
    num_before: int = 0  # tokens before it
    num_steps: int = 0  # tokens of the reply


class Backend(Costs, Protocol):
    @property
    def device(self) -> DeviceInfo: ...

    @property
    def shapes_to_warm_up(self) -> Sequence[WarmUpShape]:
        """The most likely ones first; none where nothing has to be warmed up."""
        ...

    def limit_memory(self, budget_bytes: int) -> int:
        """Keep within a budget that includes the weights; returns what is left for rows, tree and
        transients together. It may be negative: then the weights alone are too much."""
        ...

    def payload_arrays(self, component: Component, num_tokens: int) -> tuple[ArraySpec, ...]:
        """How a payload looks as bytes; KV with its tokens along the first axis.

        Backends that say the same can read what the other wrote.
        """
        ...

    def host_memory(self, nbytes: int) -> Bytes:
        """Memory of the host from which a `Load` is made without waiting; any other will do."""
        ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Enqueue; wait for no result."""
        ...

    def make_way(self, *, busy: bool) -> None:
        """Told when requests begin to run, and when none do: work of its own waits meanwhile."""
        ...

    def memory_used(self) -> int:
        """Bytes the device holds now, weights included."""
        ...

    def buffers_used(self) -> int:
        """In how many buffers, but for those of steps under way."""
        ...

    def close(self) -> None: ...


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
