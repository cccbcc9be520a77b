"""The arrays of sampling: parameters of a batch of slots, tokens of a slot. Draws no tokens.

SampleBatch    the parameter arrays of one tuple of slots; built once, used for many steps
TokenHistory   which tokens a penalised slot has read and written, on the device
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from pippin.backends.sampling.rules import FAR, GREEDY_BELOW, Draw, SlotSampling

Send = Callable[[np.ndarray], torch.Tensor]  # to the device, without waiting


@dataclass(frozen=True)
class RowSubset:
    """Some rows of a batch, or all of them; work on all of them gathers and scatters nothing."""

    rows: tuple[int, ...]
    index: torch.Tensor | None  # int64 [len(rows)]; None: every row, in order

    @classmethod
    def of(cls, rows: Sequence[int], num_rows: int, send: Send) -> RowSubset:
        whole = len(rows) == num_rows
        return cls(tuple(rows), None if whole else send(np.array(rows, dtype=np.int64)))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.index is None else x[self.index]

    def put(self, x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """x, with these rows replaced."""
        return part if self.index is None else x.index_copy(0, self.index, part)


@dataclass(frozen=True)
class DrawGroup:
    """The rows of a batch that choose in the same way. Columns are float32 [len(rows), 1]."""

    draw: Draw
    subset: RowSubset
    inverse_temperature: torch.Tensor
    top_k: torch.Tensor  # int32
    top_p: torch.Tensor  # inf where off: rounding in a cumulative sum must not drop a token
    min_p: torch.Tensor
    has_min_p: bool


@dataclass(frozen=True)
class PenaltyGroup:
    subset: RowSubset
    slots: tuple[int, ...]
    repetition: torch.Tensor  # float32 [len(slots), 1]
    presence: torch.Tensor
    frequency: torch.Tensor


@dataclass(frozen=True)
class BiasEdits:
    """Single logits to add to: logit_bias, and the stop ids of rows short of min_tokens."""

    rows: torch.Tensor  # int64 [n]
    ids: torch.Tensor  # int64 [n]
    values: torch.Tensor  # float32 [n]


@dataclass(frozen=True)
class LogprobGroup:
    subset: RowSubset
    num_top: int


@dataclass(frozen=True)
class SampleBatch:
    """All that is constant while the same slots are sampled."""

    streams: np.ndarray  # uint64 [num_rows]
    draws: tuple[DrawGroup, ...]
    penalties: PenaltyGroup | None
    edits: BiasEdits | None
    logprobs: LogprobGroup | None


def build_batch(
    slots: tuple[int, ...],
    states: Sequence[SlotSampling],
    short_of_min_tokens: tuple[int, ...],
    vocab_size: int,
    send: Send,
) -> SampleBatch:
    by_draw: dict[Draw, list[int]] = {}
    for row, state in enumerate(states):
        by_draw.setdefault(state.draw(vocab_size), []).append(row)
    return SampleBatch(
        streams=np.array([state.stream for state in states], dtype=np.uint64),
        draws=tuple(_draw_group(draw, rows, states, send) for draw, rows in by_draw.items()),
        penalties=_penalty_group(slots, states, send),
        edits=_bias_edits(states, short_of_min_tokens, send),
        logprobs=_logprob_group(states, send),
    )


def _draw_group(
    draw: Draw, rows: list[int], states: Sequence[SlotSampling], send: Send
) -> DrawGroup:
    params = [states[row].params for row in rows]

    def column(values: Sequence[float]) -> torch.Tensor:
        return send(np.array(values, dtype=np.float32)[:, None])

    return DrawGroup(
        draw=draw,
        subset=RowSubset.of(rows, len(states), send),
        inverse_temperature=column([1.0 / max(p.temperature, GREEDY_BELOW) for p in params]),
        top_k=send(np.array([p.top_k for p in params], dtype=np.int32)[:, None]),
        top_p=column([p.top_p if p.top_p < 1.0 else np.inf for p in params]),
        min_p=column([p.min_p for p in params]),
        has_min_p=any(p.min_p > 0.0 for p in params),
    )


def _penalty_group(
    slots: tuple[int, ...], states: Sequence[SlotSampling], send: Send
) -> PenaltyGroup | None:
    rows = [row for row, state in enumerate(states) if state.params.has_penalties]
    if not rows:
        return None
    params = [states[row].params for row in rows]

    def column(values: Sequence[float]) -> torch.Tensor:
        return send(np.array(values, dtype=np.float32)[:, None])

    return PenaltyGroup(
        subset=RowSubset.of(rows, len(states), send),
        slots=tuple(slots[row] for row in rows),
        repetition=column([p.repetition_penalty for p in params]),
        presence=column([p.presence_penalty for p in params]),
        frequency=column([p.frequency_penalty for p in params]),
    )


def _bias_edits(
    states: Sequence[SlotSampling], short_of_min_tokens: tuple[int, ...], send: Send
) -> BiasEdits | None:
    edits = [(row, i, b) for row, s in enumerate(states) for i, b in s.params.logit_bias.items()]
    edits += [(row, i, -FAR) for row in short_of_min_tokens for i in states[row].stop_ids]
    if not edits:
        return None
    rows, ids, values = zip(*edits, strict=True)
    return BiasEdits(
        send(np.array(rows, dtype=np.int64)),
        send(np.array(ids, dtype=np.int64)),
        send(np.array(values, dtype=np.float32)),
    )


def _logprob_group(states: Sequence[SlotSampling], send: Send) -> LogprobGroup | None:
    asked = {row: k for row, s in enumerate(states) if (k := s.params.logprobs) is not None}
    if not asked:
        return None
    return LogprobGroup(RowSubset.of(list(asked), len(states), send), max(asked.values()))


@dataclass
class TokenHistory:
    """Of each penalised slot which tokens its prompt holds, and how often its reply has which."""

    vocab_size: int
    send: Send
    _prompts: dict[int, torch.Tensor] = field(default_factory=dict)  # bool [vocab_size] by slot
    _counts: dict[int, torch.Tensor] = field(default_factory=dict)  # float32 [vocab_size] by slot

    def admit(self, slot: int, prompt: np.ndarray, reply: np.ndarray) -> None:
        seen = np.zeros(self.vocab_size, dtype=np.bool_)
        seen[prompt] = True
        self._prompts[slot] = self.send(seen)
        self._counts[slot] = self._counted(reply)

    def count(self, slot: int, tokens: np.ndarray) -> None:
        """These have been written by a slot."""
        self._counts[slot] += self._counted(tokens)

    def retire(self, slot: int) -> None:
        self._prompts.pop(slot, None)
        self._counts.pop(slot, None)

    def tables(self, slots: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """What the prompts hold, bool, and counts in the replies, float32: [len(slots), V]."""
        prompts = torch.stack([self._prompts[slot] for slot in slots])
        return prompts, torch.stack([self._counts[slot] for slot in slots])

    def append(self, slots: tuple[int, ...], tokens: torch.Tensor) -> None:
        """Count one more token, [len(slots)], of each slot."""
        one = torch.ones(1, device=tokens.device)
        for slot, token in zip(slots, tokens.long().split(1), strict=True):
            self._counts[slot].index_add_(0, token, one)

    def _counted(self, tokens: np.ndarray) -> torch.Tensor:
        counts = np.bincount(tokens, minlength=self.vocab_size)
        return self.send(counts.astype(np.float32))
