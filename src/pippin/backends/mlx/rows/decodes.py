"""The decode rows of a step: which rows slots are, one forward for them, what they are to sample.

Adds to a step what it is to sample, keep and check. Nothing here is launched: the backend decides
when.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from pippin.backends.base import DecodeRow, PrefillRow
from pippin.backends.mlx.drafts.draft_model import DraftModel
from pippin.backends.mlx.drafts.draft_rows import DraftRows, Verifier, VerifyStep, find_draft_layers
from pippin.backends.mlx.drafts.drafter import ModelDrafter, Ran, StepDrafter
from pippin.backends.mlx.load import LoadedModel
from pippin.backends.mlx.payloads.captures import Captures
from pippin.backends.mlx.prefill.batch import PromptState
from pippin.backends.mlx.prefill.prompts import Prompts
from pippin.backends.mlx.rows.decode_forward import DecodeForward
from pippin.backends.mlx.rows.decode_rows import DecodeRows
from pippin.backends.mlx.step.pending import MLXPending, RecentShapes
from pippin.backends.mlx.step.sampler import ARRAYS, send
from pippin.backends.sampling.sampler import SampleRow
from pippin.backends.step.slots import FutureMap, SlotTable

logger = logging.getLogger(__name__)


class Decodes:
    """`seen`: shapes that steps have had."""

    def __init__(
        self,
        loaded: LoadedModel,
        captures: Captures,
        slots: SlotTable[mx.array],
        *,
        num_slots: int,
        max_depth: int,
        seen: RecentShapes,
        compiled: bool,
        deterministic: bool,
        debug: bool,
    ) -> None:
        self._loaded = loaded
        self._captures = captures
        self._slots = slots
        self._seen = seen
        self._deterministic = deterministic
        layers = find_draft_layers(loaded.model, loaded.layout, deterministic=deterministic)
        if max_depth and isinstance(layers, str):
            logger.warning("no drafts are verified: %s", layers)
        self._draft_layers = [] if isinstance(layers, str) else layers
        self.max_depth = 0 if isinstance(layers, str) else max_depth
        self.future_map = FutureMap(ARRAYS, num_slots, max_depth=self.max_depth, debug=debug)
        self._verifier = Verifier(slots, self.future_map)
        self.drafter: StepDrafter | None = None
        if self.max_depth and loaded.draft is not None:
            model = DraftModel(loaded.draft, loaded.vocab_size)
            self.drafter = ModelDrafter(model, slots, self.future_map, self.max_depth)
        elif self.max_depth and loaded.mtp_head is not None:
            self.drafter = StepDrafter(loaded.mtp_head, slots, self.future_map, self.max_depth)
        self.forward = DecodeForward(
            loaded.layout,
            loaded.forward,
            compiled=compiled,
            with_hidden=loaded.forward_with_hidden if self._reads_hidden else None,
        )
        self.rows: dict[int, DecodeRows] = {}  # by slot; one for all unless deterministic
        self.shared_rows = self._make_rows()

    @property
    def _reads_hidden(self) -> bool:
        return self.drafter is not None and not isinstance(self.drafter, ModelDrafter)

    def _make_rows(self) -> DecodeRows:
        if self.max_depth:
            return DraftRows(
                self._loaded.layout,
                self._draft_layers,
                self.future_map,
                self.max_depth,
                self._loaded.attention,
            )
        return DecodeRows(self._loaded.layout, self._loaded.attention)

    @property
    def drafts_itself(self) -> int:
        return 0 if self.drafter is None else self.max_depth

    def arrays(self) -> list[mx.array]:
        rows = {id(own): own for own in (self.shared_rows, *self.rows.values())}
        drafting = [] if self.drafter is None else self.drafter.rings.arrays()
        return [array for own in rows.values() for array in own.arrays()] + drafting

    def clear(self) -> None:
        self.rows.clear()
        self.shared_rows = self._make_rows()

    # ---- slots -----------------------------------------------------------------------------

    def held(self, slot: int, start: int, end: int) -> PromptState:
        """What the slot's row has computed of tokens [start, end)."""
        rows = self.rows[slot]
        if isinstance(rows, DraftRows):
            return rows.held_at(slot, end, start)
        return PromptState(rows.rows[slot].length, rows.kv_of(slot, start), rows.states_of(slot))

    def leave(self, slot: int) -> None:
        """It may have no row: one whose prompt is not run yet, or whose launch failed."""
        if slot in self.rows:
            self.rows.pop(slot).leave(slot)
        if self.drafter is not None:
            self.drafter.forget(slot)

    # ---- one step --------------------------------------------------------------------------

    def run(self, step: MLXPending, decodes: Sequence[DecodeRow], prompts: Prompts) -> None:
        """All rows in one forward; or each in its own, so that no row's width or place matters.

        Slots that are none yet take what they hold from `prompts`.
        """
        if self._deterministic:
            for decode in decodes:
                own = self.rows.get(decode.slot) or self._make_rows()
                self._run(step, own, [decode], prompts)
        elif decodes:
            self._run(step, self.shared_rows, decodes, prompts)

    def _run(
        self, step: MLXPending, rows: DecodeRows, decodes: Sequence[DecodeRow], prompts: Prompts
    ) -> None:
        joining = [d.slot for d in decodes if d.slot not in self.rows]
        self.rows |= dict.fromkeys(joining, rows)
        rows.join(
            [(slot, prompts.take(slot)) for slot in joining],
            {slot: self._slots[slot].prompt for slot in joining},
        )
        if isinstance(rows, DraftRows):
            self._verify(step, rows, decodes)
            return
        slots, logits = rows.advance([d.slot for d in decodes], self._inputs, self.forward)
        self._note_forward(step, rows)
        step.check(slots.tolist(), logits)
        ends = {d.slot: d.end for d in decodes}
        self._add_to_sample(step, slots, logits, decodes, ends)
        for decode in decodes:
            if decode.checkpoint and rows.states:
                step.keep(self._captures.of_decode(decode, rows))

    def _inputs(self, slots: np.ndarray) -> mx.array:
        self.future_map.note_read(slots)
        return self.future_map.tokens[send(slots)]

    def _verify(self, step: MLXPending, rows: DraftRows, decodes: Sequence[DecodeRow]) -> None:
        if self.drafter is not None:
            self.drafter.prepare(decodes, lambda row: not rows.num_unsure(row.slot))
        ran, unsure = rows.verify(decodes, self.forward)
        self._note_forward(step, rows)
        logits = ran.logits[:, 0]
        step.check(ran.slots.tolist(), logits)
        num_drafts = max(decode.num_drafts for decode in decodes)
        tokens, counts = None, None
        verifies = not ran.plain or num_drafts > 0
        by_themselves = [decode for decode in decodes if decode.masked or not verifies]
        ends = {decode.slot: rows.rows[decode.slot].length for decode in by_themselves}
        self._add_to_sample(step, ran.slots, logits, by_themselves, ends)
        if verifies:
            tokens, counts = self._verifier.verify(step, rows, decodes, ran, unsure)
        if self.drafter is not None:
            if tokens is None or counts is None or not (num_drafts or self.drafter.reads_on):
                self.drafter.pass_over(decodes)
            else:
                self._draft(step, ran, tokens, counts, num_drafts)
        for decode in decodes:
            if decode.checkpoint and rows.states:
                index = rows.rows[decode.slot].index
                state = self._captures.state_of(decode.slot, rows)
                step.keep_state(decode.slot, state, ran.lengths[index : index + 1])

    def _draft(
        self,
        step: MLXPending,
        ran: VerifyStep,
        tokens: mx.array,
        counts: mx.array,
        num_drafts: int,
    ) -> None:
        """For the next steps of these rows, of what this one sampled."""
        assert self.drafter is not None
        hidden = ran.hidden[0] if ran.hidden else None
        found = Ran(ran.slots, ran.lengths, hidden, tokens, counts)
        step.written += self.drafter.draft(found, num_drafts)

    def draft_first(
        self, step: MLXPending, rows: Sequence[tuple[PrefillRow, mx.array | None]]
    ) -> None:
        """For slots whose first token was sampled, from a hidden vector [1, 1, hidden] each."""
        if rows:
            assert self.drafter is not None, "this backend says that it drafts nothing"
            step.written += self.drafter.draft_first(rows)

    def _add_to_sample(
        self,
        step: MLXPending,
        slots: np.ndarray,
        logits: mx.array,
        decodes: Sequence[DecodeRow],
        ends: Mapping[int, int],  # by slot: tokens held after the step
    ) -> None:
        by_slot = {d.slot: d for d in decodes}
        rows_of: dict[bool, dict[int, SampleRow]] = {False: {}, True: {}}  # masked or not, by place
        for place, slot in enumerate(slots.tolist()):
            decode = by_slot.get(slot)
            if decode is not None and decode.samples:
                row = SampleRow(slot, ends[slot] - int(self._slots.prompt_lens[slot]))
                rows_of[decode.masked][place] = row
        for masked, found in rows_of.items():
            if found:
                step.add_to_sample(*_picked(found, logits), masked=masked)

    def _note_forward(self, step: MLXPending, rows: DecodeRows) -> None:
        assert self.forward.last is not None
        shape, compiled = self.forward.last
        is_new = self._seen.add(shape)
        step.note_decode(is_new=is_new, compiled=compiled)
        step.written += rows.arrays()


def _picked(
    found: Mapping[int, SampleRow], logits: mx.array
) -> tuple[Sequence[SampleRow], mx.array]:
    """Rows and their logits; nothing is copied where all, or most, are wanted."""
    if len(found) > len(logits) // 2:
        padding = SampleRow(0, 0)
        return [found.get(place, padding) for place in range(len(logits))], logits
    return list(found.values()), logits[mx.array(list(found))]
