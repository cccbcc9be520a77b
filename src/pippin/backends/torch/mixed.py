"""The decode rows of a plan beside chunks of its prompts: one forward, where that is captured, of
models without recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pippin.backends.base import DecodeRow, PrefillRow, StepPlan
from pippin.backends.torch.decodes import Decodes
from pippin.backends.torch.graphs.steps import CapturedSteps, Ran
from pippin.backends.torch.prompts import Prompts
from pippin.backends.torch.step.batches import take_chunks
from pippin.backends.torch.step.chunk_inputs import pack_chunks
from pippin.backends.torch.step.decode_inputs import Choice, RowArrays
from pippin.backends.torch.step.parts import StepParts
from pippin.backends.torch.step.pending import TorchPending
from pippin.backends.torch.step.sizes import MixedSize, mixed_size_for
from pippin.backends.torch.verifies import Verifies


class MixedRows:
    def __init__(
        self,
        parts: StepParts,
        decodes: Decodes,
        prompts: Prompts,
        verifies: Verifies,
        steps: CapturedSteps[MixedSize] | None,  # None: each in a forward of its own
    ) -> None:
        self._parts = parts
        self._decodes = decodes
        self._prompts = prompts
        self._verifies = verifies
        self.steps = steps

    def run(self, step: TorchPending, plan: StepPlan) -> None:
        groups = self._prompts.begin(step, plan.prefill)
        sized = self._size(plan.decode, groups[0]) if plan.decode and groups else None
        if sized is None:
            self._decodes.run(step, plan.decode)
        else:
            self._replay(step, plan.decode, groups.pop(0), *sized)
        for chunks in groups:
            self._prompts.run(step, chunks)

    def _size(
        self, decodes: Sequence[DecodeRow], chunks: Sequence[PrefillRow]
    ) -> tuple[MixedSize, Choice] | None:
        """Of a graph that runs these, if there is one, and how it chooses."""
        if self.steps is None:
            return None
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        size = mixed_size_for(len(decodes), num_tokens, len(chunks))
        slots = self._parts.slots
        choice = max(slots.choice_of(decodes), slots.choice_of(chunks))
        choice = max(choice, Choice.DRAWN)  # greedy rows may take that too
        if (
            size is None
            or choice is Choice.LOGITS
            or self._verifies.takes(decodes, *_places(decodes))
            or not self.steps.has(size, choice)
        ):
            return None
        return size, choice

    def _replay(
        self,
        step: TorchPending,
        decodes: Sequence[DecodeRow],
        chunks: Sequence[PrefillRow],
        size: MixedSize,
        choice: Choice,
    ) -> None:
        """One copy and one replay."""
        assert self.steps is not None
        parts = self._parts
        slots, positions = _places(decodes)
        self._decodes.begin(decodes, slots)
        num_cells, num_states = self._prompts.room_of(chunks)
        assert not num_states
        parts.pools.arena.make_room(len(slots) + num_cells, num_states)
        cells = parts.rows.grow_each(slots, positions)
        rows = RowArrays(slots, positions, cells, *parts.rows.next_states(slots))
        taken = take_chunks(chunks, parts.rows, parts.pools)
        step.captures += parts.captures.of_decodes(decodes)
        step.captures += parts.captures.of_chunks(taken)
        words = pack_chunks(size.room, taken, parts.rows, parts.pools.layout)
        parts.slots.fill_samples(words.samples, chunks)
        own = self._decodes.words(size.width, rows)
        ran = self.steps.run(size, np.concatenate([own.ravel(), words.words]), choice)
        parts.draws.take_drawn(step, decodes, Ran(ran.drawn[:, : size.width]))
        self._prompts.take(step, chunks, replace(ran, drawn=ran.drawn[:, size.width :]))
        step.forwards = replace(step.forwards, prefill=step.forwards.prefill + 1)


def _places(decodes: Sequence[DecodeRow]) -> tuple[np.ndarray, np.ndarray]:
    """Slots and positions."""
    slots = np.array([decode.slot for decode in decodes])
    return slots, np.array([decode.position for decode in decodes])
