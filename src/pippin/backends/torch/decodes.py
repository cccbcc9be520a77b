"""The decode rows of a plan: one token each, by a replay where steps are captured; and drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pippin.backends.base import DecodeRow
from pippin.backends.torch.drafts.row_drafts import RowDrafts
from pippin.backends.torch.graphs.steps import CapturedSteps
from pippin.backends.torch.plain.forward import PlainForward
from pippin.backends.torch.step.batches import decode_batch
from pippin.backends.torch.step.decode_inputs import RowArrays, pack_inputs
from pippin.backends.torch.step.parts import StepParts
from pippin.backends.torch.step.pending import TorchPending
from pippin.backends.torch.step.sizes import width_for
from pippin.backends.torch.verifies import Verifies


class Decodes:
    def __init__(
        self,
        parts: StepParts,
        plain: PlainForward,
        steps: CapturedSteps[int] | None,  # by width; None: plain operations
        verifies: Verifies,
        *,
        deterministic: bool,
        drafts: RowDrafts | None = None,  # by the backend itself
    ) -> None:
        self._parts = parts
        self._plain = plain
        self.steps = steps
        self._verifies = verifies
        self._deterministic = deterministic
        self._drafts = drafts

    def run(self, step: TorchPending, decodes: Sequence[DecodeRow]) -> None:
        """All rows in one forward; or each in its own, so that no row's company matters."""
        if self._deterministic:
            for decode in decodes:
                self._run(step, [decode])
        elif decodes:
            self._run(step, decodes)

    def _run(self, step: TorchPending, decodes: Sequence[DecodeRow]) -> None:
        parts = self._parts
        slots = np.array([decode.slot for decode in decodes])
        positions = np.array([decode.position for decode in decodes])
        if self._verifies.takes(decodes, slots, positions):
            self._verifies.run(step, decodes)
            return
        self.begin(decodes, slots)
        parts.pools.arena.make_room(len(slots), parts.rows.num_new_states(slots))
        cells = parts.rows.grow_each(slots, positions)
        rows = RowArrays(slots, positions, cells, *parts.rows.next_states(slots))
        step.captures += parts.captures.of_decodes(decodes)
        if self.steps is not None:
            if self.steps.can_run(width_for(len(decodes))):
                self._run_kernels(step, self.steps, decodes, rows)
                return
            where = parts.pools.index(np.stack([slots, positions]))
            parts.rows.table[*where] = parts.pools.index(cells).int()  # as kernels do
        tokens = parts.future.tokens[parts.pools.index(slots)].long()
        batch = decode_batch(rows, tokens, parts.rows, parts.pools)
        logits = self._plain.decoder.head(self._plain.tokens(batch))
        parts.rows.release_passed(slots)
        step.check(slots.tolist(), logits)
        parts.draws.draw(step, decodes, logits)

    def begin(self, decodes: Sequence[DecodeRow], slots: np.ndarray) -> None:
        """Rows without drafts are about to run."""
        if self._drafts is not None:
            self._drafts.pass_over(decodes)
        self._parts.future.note_read(slots)

    def _run_kernels(
        self,
        step: TorchPending,
        steps: CapturedSteps[int],
        decodes: Sequence[DecodeRow],
        rows: RowArrays,
    ) -> None:
        """One copy and one replay, unless a row needs the sampler."""
        parts, width = self._parts, width_for(len(decodes))
        words = self.words(width, rows)
        ran = steps.run(width, words, parts.slots.choice_of(decodes))
        parts.draws.take_drawn(step, decodes, ran)

    def words(self, width: int, rows: RowArrays) -> np.ndarray:
        """int32 [fields, width]: what these rows read, and how they sample."""
        parts = self._parts
        words = pack_inputs(width, rows, parts.pools.layout.waste_cell)
        generated = parts.slots.num_generated(rows.slots, rows.positions + 1)
        parts.slots.columns.fill(words, rows.slots, generated)
        return words
