"""Drafts behind the rows of a step, left in the future map for their next ones. Knows no weights.

Whatever a step accepted or sampled is read on the device; the host knows which rows it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from pippin.backends.base import Admit, DecodeRow, PrefillRow
from pippin.backends.step.draft_texts import Row, is_drafted
from pippin.backends.torch.drafts.entries import Entered, Entries, StepDrafter
from pippin.backends.torch.plain.forward import noise_words
from pippin.backends.torch.step.batches import DecodeBatch, TakenRows
from pippin.backends.torch.step.parts import StepParts
from pippin.backends.torch.step.pending import TorchPending


class RowDrafts(ABC):
    """Behind rows that decode. What a drafter is fed of prompts depends on the drafter."""

    def __init__(self, parts: StepParts, drafter: StepDrafter) -> None:
        self._parts = parts
        self._drafter = drafter

    @abstractmethod
    def start(self, admit: Admit) -> None:
        """A slot has another request."""

    @abstractmethod
    def behind_chunks(self, rows: Sequence[PrefillRow], hidden: torch.Tensor | None) -> None:
        """Of chunks, one behind the other; hidden [tokens, n], where it is known."""

    @abstractmethod
    def behind_restored(self, rows: Sequence[PrefillRow], hidden: torch.Tensor) -> None:
        """Of prompts that were restored whole; hidden [rows, n]: the last tokens' own."""

    @abstractmethod
    def prepare(self, rows: Sequence[DecodeRow]) -> None:
        """A step is about to run these, and its tokens will be fed."""

    @abstractmethod
    def pass_over(self, rows: Sequence[DecodeRow]) -> None:
        """A step runs these, and its tokens are not fed."""

    @abstractmethod
    def note_sampled(self, step: TorchPending) -> None:
        """All rows of a step have been launched."""

    @abstractmethod
    def run_largest(self) -> None:
        """What takes the most memory, for no slot."""

    def behind_tokens(self, taken: TakenRows, batch: DecodeBatch, hidden: torch.Tensor) -> None:
        """Of rows that decode and have accepted and sampled; hidden [tokens, n]."""
        index, future = self._parts.pools.index, self._parts.future
        counts, sampled = future.counts[batch.slots].long(), future.tokens[batch.slots].long()
        place = torch.arange(batch.width, device=counts.device)
        known = torch.cat([batch.drafts.long(), sampled[:, None]], dim=1)
        following = torch.where(place < counts[:, None], known, sampled[:, None])
        samples = index(np.array([is_drafted(row) for row in taken.rows])) > 0
        is_kept = (place <= counts[:, None]) & samples[:, None]
        slots = torch.where(is_kept, batch.slots[:, None], 0)
        packed = np.zeros(len(taken.rows) * batch.width, dtype=np.int64)
        packed[taken.places] = np.arange(len(taken.places))
        positions = batch.starts[:, None] + place
        bound = int((taken.positions + taken.depths).max())
        entered = self._drafter.feed(
            Entries(
                batch.slots,
                slots.flatten(),
                positions.flatten(),
                following.flatten(),
                hidden[index(packed)],
            ),
            bound,
        )
        firsts = index(np.arange(len(taken.rows)) * batch.width)
        self._draft(taken.rows, entered, firsts + counts, batch.starts + counts, bound)

    def _draft(
        self,
        rows: Sequence[Row],
        entered: Entered,
        last: torch.Tensor,  # int64 [rows]: their last entries
        positions: torch.Tensor,  # int64 [rows]: of these
        bound: int,  # of any position
    ) -> None:
        """For those that ask for drafts."""
        parts, index = self._parts, self._parts.pools.index
        asking = [n for n, row in enumerate(rows) if row.num_drafts and is_drafted(row)]
        if not asking:
            return
        num_drafts = max(rows[number].num_drafts for number in asking)
        slots = np.array([rows[number].slot for number in asking])
        streams = index(parts.slots.streams[slots].view(np.int64))
        prompt_lens = index(parts.slots.prompt_lens[slots])

        def choose(logits: torch.Tensor, of_tokens: torch.Tensor) -> torch.Tensor:
            keys = noise_words(streams, of_tokens - prompt_lens)
            return parts.slots.sampler.draw_places(logits, slots.tolist(), keys)

        chosen, device_slots = index(np.array(asking)), index(slots)
        drafts = self._drafter.draft(
            entered.at(last[chosen]),
            device_slots,
            positions[chosen],
            num_drafts,
            choose,
            bound,
        )
        parts.future.stash_drafts(device_slots, drafts)
        for number in asking:
            row = rows[number]
            parts.future.note_drafts_written(np.array([row.slot]), row.num_drafts)
