"""What a step is to do, in full: a backend adds nothing of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import numpy as np

from pippin.cache.entries import Bytes
from pippin.types import Component, Payload, SamplingParams

MAX_STOP_IDS = 8  # of a row with drafts: a device stops accepting behind one of so many


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

    def placed(self) -> Iterator[tuple[Component, int, int, Payload]]:
        """Each payload with the tokens [start, end) that it covers; none where it is kept after
        `end`."""
        for component, payloads in self.payloads.items():
            if not component.divides:
                for payload in payloads:
                    yield component, self.length, self.length, payload
                continue
            start = self.length - sum(payload.num_tokens for payload in payloads)
            for payload in payloads:
                end = start + payload.num_tokens
                yield component, start, end, payload
                start = end


@dataclass(frozen=True)
class Admit:
    """A slot starts its life with these parameters."""

    slot: int
    params: SamplingParams
    stop_ids: tuple[int, ...]  # eos and the user's own; suppressed until min_tokens
    prompt: np.ndarray  # int32 [prompt_len]: what penalties look back at
    seed: int  # always set: the request's own or one drawn for it
    # int32 [n]: tokens that were sampled before the request was preempted. Its chunks run them
    # after the prompt; the next sample is the reply's token number n, and penalties count these.
    reply: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    embeds: bool = False  # return the hidden vector after the prompt, with the first token


@dataclass(frozen=True)
class Proposal:
    """Tokens that the host expects at positions [start, start + len(tokens)) of a reply.

    A guess, made from what was known when the step was planned. A row's drafts are those behind its
    length as the device has it; where the proposal has none, there is no draft.
    """

    start: int
    tokens: np.ndarray  # int32 [n]


@dataclass(frozen=True)
class PrefillRow:
    """One chunk of one prompt: tokens at positions [start, start + len(tokens)).

    Without tokens, all of the prompt is restored with its hidden vector, and the row samples.

    A slot that decodes may have a chunk too, of tokens of its reply that a grammar forces. It
    begins with the token that the slot sampled last, samples, and the slot continues decoding.
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
    num_drafts: int = 0  # for the slot's next step, by the device's drafter

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class DecodeRow(msgspec.Struct, frozen=True, gc=False):  # one per request and step: must be cheap
    """One token of one running request, and drafts behind it that are verified with it.

    The token is in the FutureMap under `slot`, and so are drafts of the device's drafter.
    """

    slot: int
    # Of the input token: the number of tokens held before this step. An upper bound, where drafts
    # are in flight: the device's own length is exact.
    position: int
    samples: bool = True  # False: absorb the last token of a finished reply for the cache
    checkpoint: bool = False  # capture the recurrent state after the input token
    masked: bool = False  # a grammar row: sampled by `PendingStep.sample` once its mask is known
    depth: int = 0  # drafts
    proposal: Proposal | None = None  # drafts of the host; None: the device's drafter made them
    num_drafts: int = 0  # for the slot's next step, by the device's drafter

    @property
    def drafted(self) -> bool:
        """Its drafts are those that the device's drafter left."""
        return self.depth > 0 and self.proposal is None

    @property
    def end(self) -> int:
        """Tokens held after this step, at most."""
        return self.position + 1 + self.depth


@dataclass(frozen=True)
class Retire:
    """A slot ends. With `captures`, the KV of positions [start, end) and the state at `end`.

    `end` is behind the input token of the row's last step, and may be before drafts that it
    accepted: a reply ended there. Without `captures` the slot may hold nothing: the launch that
    would have admitted it failed.
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

    @cached_property
    def num_drafts(self) -> int:
        """That its rows verify."""
        return sum([row.depth for row in self.decode])

    @property
    def num_drafts_left(self) -> int:
        """That the device's drafter is to leave for the next step."""
        return sum([row.num_drafts for row in self.rows])

    @property
    def samples_at_once(self) -> bool:
        """Its tokens take no forward: every prompt in it is restored whole, and no row decodes."""
        return bool(self.prefill) and not self.decode and not self.num_prefill_tokens

    @property
    def spills_alone(self) -> bool:
        return bool(self.spill) and not (self.rows or self.retire or self.admit or self.load)

    @property
    def empty(self) -> bool:
        return not (
            self.retire or self.admit or self.prefill or self.decode or self.spill or self.load
        )
