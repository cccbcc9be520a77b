"""Requests by slot: what each was admitted with and how it samples. Knows no pools, no plans."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pippin.backends.base import MAX_STOP_IDS, Admit, DecodeRow, PrefillRow
from pippin.backends.sampling.batches import Send
from pippin.backends.sampling.sampler import SampleRow
from pippin.backends.torch.step.decode_inputs import FIELDS, Choice, SamplingColumns
from pippin.backends.torch.step.filters import LeastInTopP, least_in_top_p
from pippin.backends.torch.step.sampler import TorchSampler

NO_STOP_ID = -1


class Slots:
    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        send: Send[torch.Tensor],
        in_top_p: LeastInTopP = least_in_top_p,
    ) -> None:
        self.vocab_size = vocab_size
        self.sampler = TorchSampler(vocab_size, num_slots, send, in_top_p)
        self.columns = SamplingColumns(num_slots, vocab_size)
        self._admitted: dict[int, Admit] = {}
        self.prompt_lens = np.zeros(num_slots + 1, dtype=np.int64)
        self.streams = np.zeros(num_slots + 1, dtype=np.uint64)  # of their noise
        self.stop_ids = np.full((num_slots + 1, MAX_STOP_IDS), NO_STOP_ID, dtype=np.int64)

    def __bool__(self) -> bool:
        """Whether a request runs."""
        return bool(self._admitted)

    def __getitem__(self, slot: int) -> Admit:
        return self._admitted[slot]

    def admit(self, admit: Admit) -> None:
        self._admitted[admit.slot] = admit
        self.prompt_lens[admit.slot] = len(admit.prompt)
        self.sampler.admit(admit)
        self.columns.admit(admit.slot, self.sampler.of(admit.slot))
        self.streams[admit.slot] = self.sampler.of(admit.slot).stream
        self.stop_ids[admit.slot] = NO_STOP_ID
        stop_ids = admit.stop_ids[:MAX_STOP_IDS]  # a request that has more verifies no drafts
        self.stop_ids[admit.slot, : len(stop_ids)] = stop_ids

    def retire(self, slot: int) -> None:
        self.sampler.retire(slot)
        self._admitted.pop(slot, None)  # a slot whose launch failed may hold nothing

    def clear(self) -> None:
        self._admitted.clear()

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

    def num_generated(self, slots: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Tokens of the replies that were sampled, of rows that hold so many tokens: int64."""
        found: np.ndarray = ends - self.prompt_lens[slots]
        return found

    def sample_row(self, row: DecodeRow | PrefillRow) -> SampleRow:
        return SampleRow(row.slot, row.end - int(self.prompt_lens[row.slot]))

    def continues_reply(self, row: PrefillRow) -> bool:
        """Its slot has sampled before: the chunk begins with that token."""
        admit = self._admitted[row.slot]
        return len(row.tokens) > 0 and row.start >= len(admit.prompt) + len(admit.reply)

    def num_top_logprobs(self, slot: int) -> int | None:
        admit = self._admitted.get(slot)
        return None if admit is None else admit.params.logprobs
