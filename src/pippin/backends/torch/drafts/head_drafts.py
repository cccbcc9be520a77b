"""Drafts by an MTP head behind prompts, whose hidden vectors it is fed. Knows no weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pippin.backends.base import Admit, DecodeRow, PrefillRow
from pippin.backends.step.draft_texts import is_drafted
from pippin.backends.torch.drafts.entries import Entries
from pippin.backends.torch.drafts.mtp_drafter import MtpDrafter
from pippin.backends.torch.drafts.row_drafts import RowDrafts
from pippin.backends.torch.step.parts import StepParts
from pippin.backends.torch.step.pending import TorchPending


class HeadDrafts(RowDrafts):
    def __init__(self, parts: StepParts, drafter: MtpDrafter) -> None:
        super().__init__(parts, drafter)
        self._ring = drafter.ring

    def start(self, admit: Admit) -> None:
        self._ring.start(admit.slot)

    def prepare(self, rows: Sequence[DecodeRow]) -> None:
        """It is fed with what the step computes."""

    def pass_over(self, rows: Sequence[DecodeRow]) -> None:
        """What is not fed is not seen."""

    def note_sampled(self, step: TorchPending) -> None:
        """It needs no text."""

    def run_largest(self) -> None:
        """One layer, of the tokens that a step has anyway."""

    def behind_chunks(self, rows: Sequence[PrefillRow], hidden: torch.Tensor | None) -> None:
        """The head remembers their ends."""
        assert hidden is not None
        index, future = self._parts.pools.index, self._parts.future
        slots, positions, tokens, at, ends, first = [], [], [], [], [], 0
        for row in rows:
            num_new = len(row.tokens)
            end = num_new if is_drafted(row) else num_new - 1  # what follows has to be known
            start = max(end - self._ring.length, 0)
            following = np.append(row.tokens[1:], 0)[start:end]
            tokens.append(following)
            slots.append(np.full(len(following), row.slot))
            positions.append(np.arange(row.start + start, row.start + end))
            at.append(np.arange(first + start, first + end))
            ends.append(sum(map(len, tokens)) - 1)
            first += num_new
        owners = np.concatenate(slots)
        if not len(owners):
            return
        device_tokens = index(np.concatenate(tokens))
        sampled = [number for number, row in enumerate(rows) if is_drafted(row)]
        last = index(np.array([ends[number] for number in sampled]))
        sampled_slots = index(np.array([rows[number].slot for number in sampled]))
        device_tokens[last] = future.tokens[sampled_slots].long()
        where = index(np.concatenate(positions))
        every = index(owners)  # each an entry by itself: none attends before its row's last
        known = hidden[index(np.concatenate(at))]
        entered = self._drafter.feed(Entries(every, every, where, device_tokens, known))
        own = [rows[number] for number in sampled]
        bound = max((row.end for row in own), default=0)
        self._draft(own, entered, last, where[last], bound)

    def behind_restored(self, rows: Sequence[PrefillRow], hidden: torch.Tensor) -> None:
        index = self._parts.pools.index
        slots = np.array([row.slot for row in rows])
        positions = np.array([row.end - 1 for row in rows])
        samples = np.array([is_drafted(row) for row in rows])
        device_slots, where = index(slots * samples), index(positions)
        tokens = self._parts.future.tokens[device_slots].long()
        entered = self._drafter.feed(Entries(device_slots, device_slots, where, tokens, hidden))
        last = torch.arange(len(rows), device=where.device)
        self._draft(rows, entered, last, where, int(positions.max()))
