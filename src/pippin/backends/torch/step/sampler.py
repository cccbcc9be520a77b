"""Chooses tokens: logits in, one token a row out, on the device. Knows no model and no text.

The stages, their order and their arithmetic are those of `sampling/rules.py`. Rows are grouped
by how they choose, and every group is computed row by row, so a batchmate changes nothing. The host
never learns the token here, and penalties count it on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from pippin.backends.base import Admit
from pippin.backends.masks import WORD_BITS
from pippin.backends.sampling.noise import noise_keys
from pippin.backends.sampling.rules import FAR, PADDING, Draw, SlotSampling
from pippin.backends.torch.step.filters import LeastInTopP, dropped_tokens, least_in_top_p
from pippin.backends.torch.step.noise import add_gumbel_noise
from pippin.backends.torch.step.sampling_state import (
    PenaltyGroup,
    RowSubset,
    SampleBatch,
    Send,
    TokenHistory,
    build_batch,
)

MAX_TOP_LOGPROBS = 20
_CACHED_BATCHES = 16  # the sets of slots that a few steps alternate between


@dataclass(frozen=True)
class SampleRow:
    """A row of logits: whose it is, and how many tokens of the reply were sampled before."""

    slot: int
    num_generated: int


class Logprobs(NamedTuple):
    chosen: torch.Tensor  # float32 [n]
    top_ids: torch.Tensor  # int64 [n, k], likeliest first
    top_logprobs: torch.Tensor  # float32 [n, k]


@dataclass(frozen=True)
class Sampled:
    """One token for each row, and log probabilities of the rows that asked, in order."""

    tokens: torch.Tensor  # int32 [num_rows]
    asked: tuple[int, ...] = ()  # rows
    logprobs: Logprobs | None = None  # of these


class Sampler:
    """Sampling state by slot, and the batched call over any rows of them."""

    def __init__(
        self,
        vocab_size: int,
        num_slots: int,
        send: Send,
        in_top_p: LeastInTopP = least_in_top_p,
    ) -> None:
        self._vocab_size = vocab_size
        self._in_top_p = in_top_p
        self._send = send
        self._slots = [PADDING] * (num_slots + 1)
        self._history = TokenHistory(vocab_size, send)
        self._batches: dict[tuple[tuple[int, ...], tuple[int, ...]], SampleBatch] = {}

    def admit(self, admit: Admit) -> None:
        self._forget_batches(admit.slot)
        self._slots[admit.slot] = SlotSampling.of(admit)
        if admit.params.has_penalties:
            self._history.admit(admit.slot, admit.prompt, admit.reply)

    def count(self, slot: int, tokens: np.ndarray) -> None:
        """These became part of the reply without being drawn."""
        if self._slots[slot].params.has_penalties:
            self._history.count(slot, tokens)

    def retire(self, slot: int) -> None:
        self._forget_batches(slot)
        self._slots[slot] = PADDING
        self._history.retire(slot)

    def of(self, slot: int) -> SlotSampling:
        return self._slots[slot]

    def sample(
        self,
        logits: torch.Tensor,  # any float dtype [num_rows, vocab_size]
        rows: Sequence[SampleRow],
        masks: np.ndarray | None = None,  # int32 [num_rows, words], packed: what grammars allow
    ) -> Sampled:
        assert logits.shape == (len(rows), self._vocab_size), (logits.shape, len(rows))
        batch = self._batch(rows)
        tokens = self._draw(self._process(logits, batch, masks), rows, batch)
        if batch.penalties is not None:
            drawn = batch.penalties.subset.take(tokens)
            self._history.append(batch.penalties.slots, drawn)
        if batch.logprobs is None:
            return Sampled(tokens)
        asked = batch.logprobs.subset
        found = token_logprobs(asked.take(logits), asked.take(tokens), batch.logprobs.num_top)
        return Sampled(tokens, asked.rows, found)

    def _batch(self, rows: Sequence[SampleRow]) -> SampleBatch:
        slots = tuple(row.slot for row in rows)
        states = [self._slots[slot] for slot in slots]
        short = tuple(
            i
            for i, (row, state) in enumerate(zip(rows, states, strict=True))
            if row.num_generated < state.params.min_tokens
        )
        batch = self._batches.get((slots, short))
        if batch is None:
            if len(self._batches) >= _CACHED_BATCHES:
                self._batches.clear()
            batch = build_batch(slots, states, short, self._vocab_size, self._send)
            self._batches[slots, short] = batch
        return batch

    def _forget_batches(self, slot: int) -> None:
        self._batches = {key: b for key, b in self._batches.items() if slot not in key[0]}

    def _process(
        self, logits: torch.Tensor, batch: SampleBatch, masks: np.ndarray | None
    ) -> torch.Tensor:
        """The logits to draw from; float32 if any stage before the temperature touched them."""
        x = logits
        if batch.edits is not None:
            edits = batch.edits
            x = x.float().index_put((edits.rows, edits.ids), edits.values, accumulate=True)
        if batch.penalties is not None:
            group = batch.penalties
            in_prompt, counts = self._history.tables(group.slots)
            part = penalise(group.subset.take(x).float(), in_prompt, counts, group)
            x = group.subset.put(x.float(), part)
        if masks is not None:
            x = apply_masks(x.float(), self._send(masks))
        return x

    def _draw(self, x: torch.Tensor, rows: Sequence[SampleRow], batch: SampleBatch) -> torch.Tensor:
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=x.device)
        for group in batch.draws:
            part = group.subset.take(x)
            if group.draw is not Draw.GREEDY:
                scaled = part.float() * group.inverse_temperature
                part = add_gumbel_noise(scaled, self._row_keys(rows, batch, group.subset))
                dropped = dropped_tokens(scaled, group, self._in_top_p)
                if dropped is not None:
                    part = part - dropped * FAR
            tokens = group.subset.put(tokens, part.argmax(dim=-1))
        return tokens.int()

    def _row_keys(
        self, rows: Sequence[SampleRow], batch: SampleBatch, subset: RowSubset
    ) -> torch.Tensor:
        """The bits of uint32 [len(subset.rows), 2], a function of (seed, index of the token)."""
        indices = [rows[row].num_generated for row in subset.rows]
        keys = noise_keys(batch.streams[list(subset.rows)], indices)
        return self._send(np.ascontiguousarray(keys).view(np.int32))


def penalise(
    x: torch.Tensor, in_prompt: torch.Tensor, counts: torch.Tensor, group: PenaltyGroup
) -> torch.Tensor:
    """repetition_penalty looks at prompt and reply; presence and frequency at the reply."""
    written = counts > 0
    factor = torch.where(in_prompt | written, group.repetition, 1.0)
    x = torch.where(x > 0, x / factor, x * factor)
    return x - group.frequency * counts - group.presence * written


def apply_masks(x: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """-inf where a grammar forbids, below FAR: one that allows only a stop beats min_tokens.

    masks, int32 [rows, words], travel packed and are unpacked on the device.
    """
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=x.device)
    allowed = (masks[:, :, None] >> bits & 1).bool().flatten(1)[:, : x.shape[-1]]
    return x.masked_fill(~allowed, -torch.inf)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> Logprobs:
    """Of `tokens` [n] and of the k likeliest tokens, under log_softmax of logits [n, V]."""
    x = logits.float()
    normaliser = torch.logsumexp(x, dim=-1, keepdim=True)
    chosen = x.gather(-1, tokens.long()[:, None]) - normaliser
    if k == 0:
        empty = x[:, :0]
        return Logprobs(chosen[:, 0], empty.long(), empty)
    # A fixed width, so that ties fall alike whatever others ask; sorted ids order them.
    width = min(max(k, MAX_TOP_LOGPROBS), x.shape[-1])
    ids = x.topk(width, dim=-1).indices.sort(dim=-1).values
    values = x.gather(-1, ids)
    order = values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return Logprobs(chosen[:, 0], ids.gather(-1, order), values.gather(-1, order) - normaliser)
