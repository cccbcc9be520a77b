"""Requests by slot, and how they sample in the columns of a step's words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pippin.backends.base import Admit, DecodeRow, PrefillRow
from pippin.backends.sampling.batches import Send
from pippin.backends.step.slots import SlotTable
from pippin.backends.torch.step.decode_inputs import FIELDS, Choice, SamplingColumns
from pippin.backends.torch.step.filters import LeastInTopP, least_in_top_p
from pippin.backends.torch.step.sampler import TorchSampler


class Slots(SlotTable[torch.Tensor]):
    sampler: TorchSampler

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        send: Send[torch.Tensor],
        in_top_p: LeastInTopP = least_in_top_p,
    ) -> None:
        super().__init__(num_slots, TorchSampler(vocab_size, num_slots, send, in_top_p))
        self.vocab_size = vocab_size
        self.columns = SamplingColumns(num_slots, vocab_size)

    def admit(self, admit: Admit) -> None:
        super().admit(admit)
        self.columns.admit(admit.slot, self.sampler.of(admit.slot))

    def fill_samples(self, words: np.ndarray, rows: Sequence[PrefillRow]) -> Choice:
        """How they sample, into the columns of `pack_inputs`. Those that do not are padding."""
        slots = np.array([row.slot if row.samples else 0 for row in rows])
        generated = self.num_generated(slots, np.array([row.end for row in rows]))
        self.columns.fill(words, slots, generated)
        words[FIELDS.index("slot"), : len(slots)] = slots
        return self.choice_of(rows) if slots.any() else Choice.LOGITS

    def choice_of(self, rows: Sequence[DecodeRow | PrefillRow]) -> Choice:
        """That of the most demanding row which samples."""
        samples = [row for row in rows if row.samples]
        if any(row.masked for row in samples):
            return Choice.LOGITS
        if not samples:
            return Choice.GREEDY
        slots = np.array([row.slot for row in samples])
        generated = self.num_generated(slots, np.array([row.end for row in samples]))
        return self.columns.choice(slots, generated)
