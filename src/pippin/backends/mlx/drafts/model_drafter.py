"""Drafts by a draft model: what it is fed of rows and prompts, and what it missed.

What it has yet to read of each request is in backends/step/draft_texts.py. Knows no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from pippin.backends.base import DecodeRow, PrefillRow, StepPlan
from pippin.backends.mlx.drafts.draft_model import DraftModel
from pippin.backends.mlx.drafts.draft_rows import VerifyStep
from pippin.backends.mlx.drafts.drafter import StepDrafter
from pippin.backends.mlx.drafts.missed_steps import Ran
from pippin.backends.mlx.step.pending import MLXPending
from pippin.backends.step.draft_texts import MOST_FED, DraftTexts, Missing
from pippin.backends.step.slots import FutureMap, SlotTable


class ModelDrafter(StepDrafter):
    reads_on = True

    def __init__(
        self,
        model: DraftModel,
        slots: SlotTable[mx.array],
        future_map: FutureMap[mx.array],
        max_depth: int,
    ) -> None:
        super().__init__(model, slots, future_map, max_depth)
        self._texts = DraftTexts(min(MOST_FED, model.longest), model.loaded.max_len)

    def begin(self, plan: StepPlan) -> None:
        for admit in plan.admit:
            self._texts.start(admit)
        for row in plan.prefill:
            self._texts.note_chunk(row)

    def prepare(self, rows: Sequence[DecodeRow], is_exact: Callable[[DecodeRow], bool]) -> None:
        for group in self._texts.to_feed(rows, is_exact):
            self._feed(group, mx.zeros((len(group), 0, 2), mx.uint32))

    def pass_over(self, rows: Sequence[DecodeRow], ran: VerifyStep) -> None:
        self._texts.pass_over(rows)

    def note_sampled(self, step: MLXPending) -> None:
        self._texts.note_sampled(step)

    def forget(self, slot: int) -> None:
        super().forget(slot)
        self._texts.restart(slot)

    def draft(self, ran: Ran, num_drafts: int) -> list[mx.array]:
        for slot in ran.slots[ran.slots > 0].tolist():
            if not self._texts[slot].is_fed:  # what it missed is not known yet
                self.forget(slot)
        return super().draft(ran, num_drafts)

    def draft_first(self, rows: Sequence[tuple[PrefillRow, mx.array | None]]) -> list[mx.array]:
        by_slot, written = {row.slot: row for row, _ in rows}, list[mx.array]()
        for group in self._texts.behind_chunks(list(by_slot.values())):
            lengths = mx.array([missing.end - 1 for missing in group], mx.int32)
            slots = np.array([missing.slot for missing in group], dtype=np.int32)
            one = mx.zeros((len(group), 1), mx.int32)
            ran = Ran(slots, lengths, None, one, None, one[:, 0])
            num_drafts = max(by_slot[missing.slot].num_drafts for missing in group)
            written += self._feed(group, self._noise(ran, num_drafts))
        return written

    def _feed(self, group: Sequence[Missing], noise: mx.array) -> list[mx.array]:
        """And leave as many drafts as there is noise for."""
        lengths = np.array([missing.num_tokens for missing in group], dtype=np.int32)
        tokens = np.zeros((len(group), int(lengths.max())), dtype=np.int32)
        for line, missing in enumerate(group):
            tokens[line, : len(missing.tokens)] = missing.tokens
            if missing.restarts:
                self.rings.forget(missing.slot)
        slots = np.array([missing.slot for missing in group], dtype=np.int32)
        counts = mx.array(lengths - 1)
        is_last = mx.arange(tokens.shape[1])[None] == counts[:, None]
        on_device = self._future_map.tokens[mx.array(slots)][:, None]
        before = mx.array([missing.first - 1 for missing in group], mx.int32)
        rings = self.rings.joined(slots.tolist(), before)
        return self._run_rows(
            slots,
            rings,
            (None, mx.where(is_last, on_device, mx.array(tokens)), counts, before - rings.starts),
            noise,
        )
