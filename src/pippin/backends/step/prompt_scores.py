"""Log probabilities of a prompt's own tokens, in blocks of positions, for requests that ask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from pippin.backends.base import PrefillRow
from pippin.backends.sampling.batches import A
from pippin.backends.sampling.rules import SCORED_BYTES, scored_positions
from pippin.backends.step.pending import Arrival, Pending
from pippin.backends.step.slots import SlotTable

S = TypeVar("S", bound=Pending[Any])


class PromptScores(ABC, Generic[A, S]):
    block_bytes = SCORED_BYTES  # of float32 logits: those of a whole chunk may be gigabytes

    def __init__(self, slots: SlotTable[A], vocab_size: int) -> None:
        self._slots = slots
        self._vocab_size = vocab_size
        self._arriving: dict[int, list[Arrival]] = {}  # by slot, of chunks before the last

    def wants(self, chunk: PrefillRow) -> bool:
        asked = self._slots[chunk.slot].params.prompt_logprobs is not None
        return asked and not self._slots.continues_reply(chunk)

    def retire(self, slot: int) -> None:
        self._arriving.pop(slot, None)

    def add(self, step: S, chunk: PrefillRow, source: A) -> None:
        """Logits of positions start.. are for tokens start + 1..; the last is drawn.

        `source`: what logits are made of, of every position of the chunk.
        """
        admit = self._slots[chunk.slot]
        targets = admit.prompt[chunk.start + 1 : chunk.end + 1]
        arriving = self._arriving.setdefault(chunk.slot, [])
        at_a_time = scored_positions(self._vocab_size, self.block_bytes)
        for start in range(0, len(targets), at_a_time):
            end, number = start + at_a_time, admit.params.prompt_logprobs or 0
            scored = self._score(step, source, targets, range(start, end), number)
            arriving.append(step.bring(scored))
        if chunk.samples:
            step.prompt_logprobs[chunk.slot] = []
            for arrival in self._arriving.pop(chunk.slot):
                step.read_later(arrival, partial(step.read_prompt_logprobs, chunk.slot))

    @abstractmethod
    def _score(
        self, step: S, source: A, targets: np.ndarray, places: range, number: int
    ) -> Sequence[A]:
        """Of the targets at these places, or the last of them: log probabilities, and of the
        likeliest tokens so many ids with theirs."""
