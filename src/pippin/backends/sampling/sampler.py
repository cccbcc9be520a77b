"""Chooses tokens: logits in, one token a row out, on the device.

The stages and their order are here, for every backend; a backend's sampler writes each stage in
its own operations (`rules.py` says what they compute). Rows are grouped by how they choose, and
each row is computed by itself, so a batchmate changes nothing. Nothing here blocks: the host does
not learn the token, and penalties count it on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import numpy as np

from pippin.backends.base import Admit
from pippin.backends.sampling.batches import (
    A,
    BiasEdits,
    DrawGroup,
    PenaltyGroup,
    RowSubset,
    SampleBatch,
    TokenHistory,
)
from pippin.backends.sampling.noise import noise_keys
from pippin.backends.sampling.rules import PADDING, SlotSampling

MAX_TOP_LOGPROBS = 20
ANY_NUMBER = 1 << 40  # of a token of a reply: beyond every min_tokens
_CACHED_BATCHES = 16  # the sets of slots that a few steps alternate between


@dataclass(frozen=True)
class SampleRow:
    """A row of logits: its slot, and how many tokens of the reply were sampled before."""

    slot: int  # 0: padding, its result means nothing
    num_generated: int


class Logprobs(NamedTuple, Generic[A]):
    chosen: A  # float32 [n]
    top_ids: A  # int [n, k], likeliest first
    top_logprobs: A  # float32 [n, k]


@dataclass(frozen=True)
class Sampled(Generic[A]):
    """One token for each row, and log probabilities of the rows that asked, in order."""

    tokens: A  # int32 [num_rows]
    asked: tuple[int, ...] = ()  # rows
    logprobs: Logprobs[A] | None = None  # of these
    counts: A | None = None  # the penalties' new table

    @property
    def arrays(self) -> tuple[A, ...]:
        """All that was computed: where arrays are lazy, what is left out keeps its graph alive."""
        counts = () if self.counts is None else (self.counts,)
        return (self.tokens, *(self.logprobs or ()), *counts)


class Sampler(ABC, Generic[A]):
    """Sampling state by slot, and the batched call over any rows of them."""

    def __init__(self, vocab_size: int, num_slots: int) -> None:
        self._vocab_size = vocab_size
        self._slots = [PADDING] * (num_slots + 1)
        self._history = TokenHistory(vocab_size, self._send, self._stack, self._count_each)
        self._batches: dict[tuple[tuple[int, ...], tuple[int, ...]], SampleBatch[A]] = {}

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
        logits: A,  # any float dtype [num_rows, vocab_size]
        rows: Sequence[SampleRow],
        masks: np.ndarray | None = None,  # int32 [num_rows, words], packed: what grammars allow
        keys: Any = None,  # uint32 [num_rows, 2], of the noise, where the device knows better
    ) -> Sampled[A]:
        batch = self._batch(rows)
        if keys is None:
            keys = noise_keys(batch.streams, [row.num_generated for row in rows])
        tokens = self._draw(self._process(logits, batch, masks), batch, keys)
        counts, asked = None, batch.logprobs
        if batch.penalties is not None:
            drawn = batch.penalties.subset.take(tokens)
            counts = self._history.append(batch.penalties.slots, drawn)
        if asked is None:
            return Sampled(tokens, counts=counts)
        raw, drawn = asked.subset.take(logits), asked.subset.take(tokens)
        found = self._token_logprobs(raw, drawn, asked.num_top)
        return Sampled(tokens, asked.subset.rows, found, counts)

    def _batch(self, rows: Sequence[SampleRow]) -> SampleBatch[A]:
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
            batch = SampleBatch(slots, states, short, self._vocab_size, self._send)
            self._batches[slots, short] = batch
        return batch

    def _forget_batches(self, slot: int) -> None:
        self._batches = {key: b for key, b in self._batches.items() if slot not in key[0]}

    def _process(self, logits: A, batch: SampleBatch[A], masks: np.ndarray | None) -> A:
        """The logits to draw from; float32 if any stage before the temperature touched them."""
        x = logits
        if batch.edits is not None:
            x = self._add_biases(x, batch.edits)
        if batch.penalties is not None:
            group = batch.penalties
            in_prompt, counts = self._history.tables(group.slots)
            part = self._penalise(group.subset.take(x), in_prompt, counts, group)
            x = self._put(x, group.subset, part)
        return x if masks is None else self._apply_masks(x, masks)

    def _draw(self, x: A, batch: SampleBatch[A], keys: np.ndarray) -> A:
        """int32 [num_rows]. `keys`, uint32 [num_rows, 2], are those of the rows' noise."""
        first, *others = batch.draws
        tokens = self._choose(first.subset.take(x), first, keys[list(first.subset.rows)])
        if not others:
            return tokens
        tokens = self._put(self._send(np.zeros(len(keys), np.int32)), first.subset, tokens)
        for group in others:
            part = self._choose(group.subset.take(x), group, keys[list(group.subset.rows)])
            tokens = self._put(tokens, group.subset, part)
        return tokens

    # ---- in a backend's own operations -----------------------------------------------------

    @abstractmethod
    def _send(self, array: np.ndarray) -> A:
        """To the device, without waiting."""

    @abstractmethod
    def _stack(self, rows: Sequence[A]) -> A: ...

    @abstractmethod
    def _count_each(self, counts: A, tokens: A) -> A:
        """float32 [n, V] with one more of each row's token; may change `counts` itself."""

    @abstractmethod
    def _put(self, x: A, subset: RowSubset[A], part: A) -> A:
        """x, which stays as it is, with these rows replaced; of the type of `part`."""

    @abstractmethod
    def _add_biases(self, x: A, edits: BiasEdits[A]) -> A: ...

    @abstractmethod
    def _penalise(self, x: A, in_prompt: A, counts: A, group: PenaltyGroup[A]) -> A: ...

    @abstractmethod
    def _apply_masks(self, x: A, masks: np.ndarray) -> A: ...

    @abstractmethod
    def _choose(self, x: A, group: DrawGroup[A], keys: np.ndarray) -> A:
        """int32 [n]: the tokens of rows [n, V] that choose in the same way."""

    @abstractmethod
    def _token_logprobs(self, logits: A, tokens: A, k: int) -> Logprobs[A]:
        """Of `tokens` [n] and of the k likeliest tokens, under log_softmax of logits [n, V]."""
