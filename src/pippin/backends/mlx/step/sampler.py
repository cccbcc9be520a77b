"""Chooses tokens: logits in, one token a row out, in one on-device call. Knows no model, no text.

The stages, their order and their arithmetic are those of `backends/sampling/rules.py`. From the
temperature on they are one operation where we have it (cpu/operations); elsewhere rows are grouped
by how they choose. Either way each row is computed by itself, so a batchmate changes nothing.
Nothing here blocks: the host never learns the token, and penalties count it on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from pippin.backends.base import Admit
from pippin.backends.masks import WORD_BITS
from pippin.backends.mlx.cpu.operations.calls import operations
from pippin.backends.mlx.step.filters import dropped_tokens
from pippin.backends.mlx.step.largest import candidates
from pippin.backends.mlx.step.noise import add_gumbel_noise
from pippin.backends.mlx.step.sampling_state import (
    BiasEdits,
    PenaltyGroup,
    SampleBatch,
    TokenHistory,
    build_batch,
)
from pippin.backends.sampling.noise import noise_keys
from pippin.backends.sampling.rules import FAR, PADDING, Draw, SlotSampling

MAX_TOP_LOGPROBS = 20
BEYOND_FAR = FAR * 100
_CACHED_BATCHES = 16  # the sets of slots that a few steps alternate between


@dataclass(frozen=True)
class SampleRow:
    """A row of logits: whose it is, and how many tokens of the reply were sampled before."""

    slot: int  # 0: padding, its result means nothing
    num_generated: int


class Logprobs(NamedTuple):
    chosen: mx.array  # float32 [n]
    top_ids: mx.array  # int32 [n, k], likeliest first
    top_logprobs: mx.array  # float32 [n, k]


@dataclass(frozen=True)
class Sampled:
    """One token for each row. Pass all of `arrays` to the step's `mx.async_eval`.

    The logprob fields are None when no row asked; otherwise they have a line for every row (it
    means nothing for a row that did not ask) and as many columns as the most that a row asked.
    """

    tokens: mx.array  # int32 [num_rows]
    logprobs: mx.array | None = None  # float32 [num_rows]
    top_ids: mx.array | None = None  # int32 [num_rows, k]
    top_logprobs: mx.array | None = None  # float32 [num_rows, k]
    history: mx.array | None = None  # the penalties' new counts; left lazy they keep the graph

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        fields = (self.tokens, self.logprobs, self.top_ids, self.top_logprobs, self.history)
        return tuple(array for array in fields if array is not None)


class Sampler:
    """Sampling state by slot, and the batched call over any rows of them."""

    def __init__(self, vocab_size: int, num_slots: int) -> None:
        self._vocab_size = vocab_size
        self._slots = [PADDING] * (num_slots + 1)
        self._history = TokenHistory(vocab_size)
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

    def sample(
        self,
        logits: mx.array,  # any float dtype [num_rows, vocab_size]
        rows: Sequence[SampleRow],
        masks: np.ndarray | None = None,  # int32 [num_rows, words], packed: what grammars allow
    ) -> Sampled:
        if not rows:
            return Sampled(mx.zeros([0], dtype=mx.int32))
        assert logits.shape == (len(rows), self._vocab_size), (logits.shape, len(rows))
        batch = self._batch(rows)
        tokens = self._draw(self._process(logits, batch, masks), rows, batch)
        history = None
        if batch.penalties is not None:
            drawn = batch.penalties.subset.take(tokens)
            history = self._history.append(batch.penalties.slots, drawn)
        if batch.logprobs is None:
            return Sampled(tokens, history=history)
        asked, k = batch.logprobs.subset, batch.logprobs.num_top
        found = token_logprobs(asked.take(logits), asked.take(tokens), k)
        if batch.logprobs.places is not None:
            found = Logprobs(*(array[batch.logprobs.places] for array in found))
        return Sampled(tokens, *found, history=history)

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
            batch = build_batch(slots, states, short, self._vocab_size)
            self._batches[slots, short] = batch
        return batch

    def _forget_batches(self, slot: int) -> None:
        self._batches = {key: b for key, b in self._batches.items() if slot not in key[0]}

    def _process(self, logits: mx.array, batch: SampleBatch, masks: np.ndarray | None) -> mx.array:
        """The logits to draw from; float32 if any stage before the temperature touched them."""
        x = logits
        if batch.edits is not None:
            x = apply_edits(x.astype(mx.float32), batch.edits)
        if batch.penalties is not None:
            group = batch.penalties
            in_prompt, counts = self._history.tables(group.slots)
            x = group.subset.replace(
                x.astype(mx.float32), lambda part: penalise(part, in_prompt, counts, group)
            )
        if masks is not None:
            x = apply_masks(x.astype(mx.float32), masks)
        return x

    def _draw(self, x: mx.array, rows: Sequence[SampleRow], batch: SampleBatch) -> mx.array:
        keys = noise_keys(batch.streams, [row.num_generated for row in rows])
        ours = operations("choose")
        if ours is not None:
            return ours.choose(x.astype(mx.float32), batch.choices, mx.array(keys))
        return _draw_by_groups(x, keys, batch)


def _draw_by_groups(x: mx.array, keys: np.ndarray, batch: SampleBatch) -> mx.array:
    """In mlx's operations. Keys, uint32 [num_rows, 2], are those of the rows' noise."""
    parts = []
    for group in batch.draws:
        part = group.subset.take(x)
        if group.draw is not Draw.GREEDY:
            scaled = part.astype(mx.float32) * group.inverse_temperature
            part = add_gumbel_noise(scaled, mx.array(keys[list(group.subset.rows)]))
            dropped = dropped_tokens(scaled, group)
            if dropped is not None:
                # Not mx.where: its branches mispredict, five times as slow on CPU.
                part = part - dropped * FAR
        parts.append(mx.argmax(part, axis=-1))
    tokens = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    if batch.places is not None:
        tokens = tokens[batch.places]
    return tokens.astype(mx.int32)


def apply_edits(x: mx.array, edits: BiasEdits) -> mx.array:
    return x.at[edits.rows, edits.ids].add(edits.values)


def penalise(x: mx.array, in_prompt: mx.array, counts: mx.array, group: PenaltyGroup) -> mx.array:
    """repetition_penalty looks at prompt and reply; presence and frequency at the reply."""
    written = counts > 0
    if group.repetition is not None:
        factor = mx.where(in_prompt | written, group.repetition, 1.0)
        x = mx.where(x > 0, x / factor, x * factor)
    return x - group.frequency * counts - group.presence * written


def apply_masks(x: mx.array, masks: np.ndarray) -> mx.array:
    """Lowered beyond FAR where a grammar forbids: one that allows only a stop beats min_tokens.

    Masks travel packed and are unpacked on the device. Not mx.where: ten times as slow on CPU.
    """
    bits = mx.array(1, dtype=mx.uint32) << mx.arange(WORD_BITS, dtype=mx.uint32)
    forbidden = ~mx.array(masks.view(np.uint32))[:, :, None] & bits  # 0, or some power of two
    forbidden = forbidden.astype(mx.float32).reshape(len(masks), -1)[:, : x.shape[-1]]
    return x - forbidden * BEYOND_FAR


def token_logprobs(logits: mx.array, tokens: mx.array, k: int) -> Logprobs:
    """Of `tokens` [n] and of the k likeliest tokens, under log_softmax of logits [n, V]."""
    x = logits.astype(mx.float32)
    normaliser = mx.logsumexp(x, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(x, tokens[:, None], axis=-1) - normaliser
    if k == 0:
        empty = [len(tokens), 0]
        return Logprobs(chosen[:, 0], mx.zeros(empty, dtype=mx.int32), mx.zeros(empty))
    # A fixed width, so that ties fall alike whatever others ask; sorted ids order them.
    width = min(max(k, MAX_TOP_LOGPROBS), x.shape[-1])
    found, where = candidates(x, width)
    places = mx.argpartition(found, -width, axis=-1)[:, -width:]
    ids = mx.sort(mx.take_along_axis(where, places, axis=-1), axis=-1)
    values = mx.take_along_axis(x, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)[:, :k]
    top = mx.take_along_axis(values, order, axis=-1) - normaliser
    return Logprobs(chosen[:, 0], mx.take_along_axis(ids, order, axis=-1).astype(mx.int32), top)
