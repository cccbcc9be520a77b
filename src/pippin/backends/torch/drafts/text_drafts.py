"""Drafts by a model of its own, which reads tokens alone. Knows no weights.

What it has yet to read of each request is in backends/step/draft_texts.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pippin.backends.base import Admit, DecodeRow, PrefillRow
from pippin.backends.step.draft_texts import MOST_FED, MOST_TOKENS, DraftTexts, Missing
from pippin.backends.torch.drafts.entries import Entered, Entries
from pippin.backends.torch.drafts.model_drafter import ModelDrafter
from pippin.backends.torch.drafts.row_drafts import RowDrafts
from pippin.backends.torch.step.parts import StepParts
from pippin.backends.torch.step.pending import TorchPending


class TextDrafts(RowDrafts):
    def __init__(self, parts: StepParts, drafter: ModelDrafter) -> None:
        super().__init__(parts, drafter)
        self._model = drafter
        self._texts = DraftTexts(min(MOST_FED, drafter.ring.length // 2), drafter.most_places)

    def start(self, admit: Admit) -> None:
        self._texts.start(admit)

    def prepare(self, rows: Sequence[DecodeRow]) -> None:
        least = self._parts.rows.least_lengths
        for group in self._texts.to_feed(rows, lambda row: bool(least[row.slot] == row.position)):
            self._feed(group)

    def pass_over(self, rows: Sequence[DecodeRow]) -> None:
        self._texts.pass_over(rows)

    def note_sampled(self, step: TorchPending) -> None:
        self._texts.note_sampled(step)

    def behind_chunks(self, rows: Sequence[PrefillRow], hidden: torch.Tensor | None) -> None:
        for row in rows:
            self._texts.note_chunk(row)
        by_slot, index = {row.slot: row for row in rows}, self._parts.pools.index
        for group in self._texts.behind_chunks(rows):
            entered, last = self._feed(group)
            ends = np.array([missing.end for missing in group])
            own = [by_slot[missing.slot] for missing in group]
            self._draft(own, entered, last, index(ends - 1), int(ends.max()))

    def behind_restored(self, rows: Sequence[PrefillRow], hidden: torch.Tensor) -> None:
        self.behind_chunks(rows, None)

    def run_largest(self) -> None:
        most_fed = self._texts.most_fed
        num_rows = min(len(self._model.firsts) - 1, MOST_TOKENS // most_fed)
        group = [Missing(0, 0, most_fed - 1, np.zeros(most_fed - 1, dtype=np.int32))]
        self._feed(group * num_rows)

    def _feed(self, group: Sequence[Missing]) -> tuple[Entered, torch.Tensor]:
        """What the model makes of them, and where the last of each row is, int64 [rows]."""
        index, num_rows = self._parts.pools.index, len(group)
        lengths = np.array([missing.num_tokens for missing in group])
        width, owners = int(lengths.max()), np.array([missing.slot for missing in group])
        tokens, positions = np.zeros((2, num_rows, width), dtype=np.int64)
        for row, missing in enumerate(group):
            tokens[row, : len(missing.tokens)] = missing.tokens
            positions[row] = missing.first - 1 + np.arange(width)
            if missing.restarts:
                self._model.start(missing.slot, missing.first)
        slots = np.where(np.arange(width) < lengths[:, None], owners[:, None], 0)
        last, device_owners = index(np.arange(num_rows) * width + lengths - 1), index(owners)
        device_tokens = index(tokens.ravel())
        device_tokens[last] = self._parts.future.tokens[device_owners].long()
        places = lengths + np.array([missing.first for missing in group])
        bound = int((places - self._model.firsts[owners]).max()) - 2
        entries = Entries(
            device_owners, index(slots.ravel()), index(positions.ravel()), device_tokens, None
        )
        return self._model.feed(entries, bound), last
