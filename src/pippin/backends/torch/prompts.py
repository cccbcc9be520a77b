"""The prefill rows of a plan: prefixes are restored, chunks run, and the token behind is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from pippin.backends.base import PrefillRow, Restore
from pippin.backends.chunking import cut_chunk, grid_blocks
from pippin.backends.torch.drafts.row_drafts import RowDrafts
from pippin.backends.torch.graphs.steps import CapturedSteps, Ran
from pippin.backends.torch.models.parts import Linear
from pippin.backends.torch.plain.forward import ChunkForward
from pippin.backends.torch.pools.layout import ZERO_SLAB
from pippin.backends.torch.pools.payloads import HiddenPayload, KVPayload, StatePayload
from pippin.backends.torch.prompt_scores import TorchPromptScores
from pippin.backends.torch.step.batches import (
    TakenChunks,
    chunk_batch,
    inner_checkpoints,
    take_chunks,
)
from pippin.backends.torch.step.chunk_inputs import pack_chunks
from pippin.backends.torch.step.parts import StepParts
from pippin.backends.torch.step.pending import TorchPending
from pippin.backends.torch.step.sizes import Room, group_by_room, room_for, width_for
from pippin.types import Component

_NO_CELLS = np.zeros(0, dtype=np.int32)


class Prompts:
    def __init__(
        self,
        parts: StepParts,
        forward: ChunkForward,
        head: Linear,
        plain: ChunkForward,
        graphs: CapturedSteps[Room] | None,  # None: every chunk is launched
        *,
        deterministic: bool,
        max_tokens: int,  # of a chunk, where layers have a window
        drafts: RowDrafts | None = None,  # by the backend itself
    ) -> None:
        self._parts = parts
        self._forward = forward
        self._head = head
        self._plain = plain
        self.graphs = graphs
        self._deterministic = deterministic
        self._max_tokens = max_tokens
        self._drafts = drafts
        self._scores = TorchPromptScores(parts, head, pads=graphs is not None)

    def retire(self, slot: int) -> None:
        self._scores.retire(slot)

    def begin(self, step: TorchPending, rows: Sequence[PrefillRow]) -> list[Sequence[PrefillRow]]:
        """Restores prefixes. The chunks to run, those of each forward."""
        parts = self._parts
        for row in rows:
            if row.restore is not None:
                self._restore(row.slot, row.restore)
                step.check_restored(row.slot, row.restore)
            assert parts.rows.lengths[row.slot] == row.start, "chunks must follow each other"
            if parts.slots.continues_reply(row):
                parts.future.note_read(np.array([row.slot]))
                parts.slots.sampler.count(row.slot, row.tokens[1:])  # the first was, when drawn
        self._sample_restored(step, [row for row in rows if not len(row.tokens)])
        return self._groups([row for row in rows if len(row.tokens)])

    def _restore(self, slot: int, restore: Restore) -> None:
        cells, windows = (
            np.concatenate([_NO_CELLS, *(p.cells for p in _of(KVPayload, restore, kind))])
            for kind in (Component.ATTENTION, Component.WINDOW)
        )
        states = _of(StatePayload, restore, Component.STATE)
        slab = states[-1].slab if states else ZERO_SLAB
        self._parts.rows.borrow(slot, restore.length, cells, windows, slab)

    def _sample_restored(self, step: TorchPending, rows: Sequence[PrefillRow]) -> None:
        """Prompts that are restored whole: the head is all that is computed of them."""
        for group in [[row] for row in rows] if self._deterministic else [rows] if rows else []:
            hidden = torch.stack([_hidden_of(row) for row in group])
            self._read_hidden(step, group, hidden)
            self._sample(step, group, self._logits(hidden))
            if self._drafts is not None:
                self._drafts.behind_restored(group, hidden)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of as many rows as a decode step has: a product of another size may be the first."""
        num_rows = len(hidden)
        padding = 0 if self.graphs is None else width_for(max(num_rows, 2)) - num_rows
        return self._head(F.pad(hidden, (0, 0, 0, padding)))[:num_rows]

    def _groups(self, chunks: Sequence[PrefillRow]) -> list[Sequence[PrefillRow]]:
        if self._deterministic:  # every block of the absolute grid by itself, always
            return [[block] for chunk in chunks for block in grid_blocks(chunk)]
        if self.graphs is not None and self.graphs.works:
            return [*group_by_room(chunks)]
        most = self._max_tokens
        if self._parts.rows.windows is None or all(len(chunk.tokens) <= most for chunk in chunks):
            return [chunks] if chunks else []
        # No row may hold more of a window than `row_bytes` says.
        parts = [cut_chunk(chunk, range(chunk.start + most, chunk.end, most)) for chunk in chunks]
        return [
            [part for part in parts_now if part is not None] for parts_now in zip_longest(*parts)
        ]

    def run(self, step: TorchPending, chunks: Sequence[PrefillRow]) -> None:
        """Chunks that share a forward."""
        parts = self._parts
        parts.pools.arena.make_room(*self.room_of(chunks))
        taken = take_chunks(chunks, parts.rows, parts.pools)
        step.captures += parts.captures.of_chunks(taken)
        if (room := self._room(chunks)) is None:
            self._launch(step, taken)
        else:
            self._replay(step, taken, room)
        step.forwards = replace(step.forwards, prefill=step.forwards.prefill + 1)

    def room_of(self, chunks: Sequence[PrefillRow]) -> tuple[int, int]:
        """Cells and states that they will take."""
        rows, slots = self._parts.rows, np.array([chunk.slot for chunk in chunks])
        num_taps = sum(len(inner_checkpoints(chunk)) for chunk in chunks)
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        return num_tokens, rows.num_new_states(slots) + num_taps * rows.keeps_states

    def _room(self, chunks: Sequence[PrefillRow]) -> Room | None:
        """Of a graph that runs these chunks, if there is one."""
        if self.graphs is None:
            return None
        room = room_for(sum(len(chunk.tokens) for chunk in chunks), len(chunks))
        return room if room is not None and self.graphs.prepare(room) else None

    def _launch(self, step: TorchPending, taken: TakenChunks) -> None:
        """One operation after the other, in whatever shapes the chunks have."""
        parts, chunks = self._parts, taken.rows
        batch = chunk_batch(taken, parts.rows, parts.pools)
        is_plain = self.graphs is not None and self.graphs.failed  # kernels of many tokens raise
        hidden = (self._plain if is_plain else self._forward).chunks(batch)
        parts.rows.release_passed(taken.slots)
        self._score(step, chunks, hidden)
        last = hidden[batch.last]
        self._keep_hidden(step, chunks, last)
        self._sample(step, chunks, self._head(last))
        if self._drafts is not None:
            self._drafts.behind_chunks(chunks, hidden)

    def _replay(self, step: TorchPending, taken: TakenChunks, room: Room) -> None:
        assert self.graphs is not None
        parts, chunks = self._parts, taken.rows
        words = pack_chunks(room, taken, parts.rows, parts.pools.layout)
        choice = parts.slots.fill_samples(words.samples, chunks)
        self.take(step, chunks, self.graphs.run(room, words.words, choice))

    def take(self, step: TorchPending, chunks: Sequence[PrefillRow], ran: Ran) -> None:
        """What a graph made of these."""
        assert ran.hidden is not None
        assert ran.every_hidden is not None
        self._score(step, chunks, ran.every_hidden)
        self._keep_hidden(step, chunks, ran.hidden)
        self._parts.draws.take_drawn(step, chunks, ran)
        if self._drafts is not None:
            self._drafts.behind_chunks(chunks, ran.every_hidden)

    def _sample(self, step: TorchPending, rows: Sequence[PrefillRow], logits: torch.Tensor) -> None:
        """The token after a prompt, or after what is known of a reply that goes on."""
        step.check([row.slot for row in rows], logits)
        self._parts.draws.draw(step, rows, logits)

    def _score(
        self, step: TorchPending, chunks: Sequence[PrefillRow], hidden: torch.Tensor
    ) -> None:
        """hidden [tokens, hidden]: what the head reads, of every token of the chunks."""
        first = 0
        for chunk in chunks:
            if self._scores.wants(chunk):
                self._scores.add(step, chunk, hidden[first : first + len(chunk.tokens)])
            first += len(chunk.tokens)

    def _keep_hidden(
        self, step: TorchPending, chunks: Sequence[PrefillRow], hidden: torch.Tensor
    ) -> None:
        """For the tree, with the captures of prompts' ends; and for requests that embed."""
        wanted = {
            chunk.slot: number
            for number, chunk in enumerate(chunks)
            if chunk.captures and chunk.samples
        }
        for index, capture in enumerate(step.captures):
            number = wanted.get(capture.slot)
            if number is not None and not capture.retired and capture.end == chunks[number].end:
                payload = HiddenPayload(self._parts.pools, hidden[number].clone())
                step.captures[index] = replace(capture, hidden=payload)
        self._read_hidden(step, chunks, hidden)

    def _read_hidden(
        self, step: TorchPending, rows: Sequence[PrefillRow], hidden: torch.Tensor
    ) -> None:
        """At the ends of prompts that are embedded."""
        parts = self._parts
        ends = {
            row.slot: number
            for number, row in enumerate(rows)
            if row.samples and parts.slots[row.slot].embeds
        }
        if ends:
            found = hidden[parts.pools.index(np.array(list(ends.values())))].float()
            step.bring_hidden(list(ends), found)


Kind = TypeVar("Kind", KVPayload, StatePayload, HiddenPayload)


def _of(kind: type[Kind], restore: Restore, component: Component) -> list[Kind]:
    found = restore.payloads.get(component, ())
    return [payload for payload in found if isinstance(payload, kind)]


def _hidden_of(row: PrefillRow) -> torch.Tensor:
    assert row.restore is not None
    hidden = _of(HiddenPayload, row.restore, Component.HIDDEN)[-1].hidden
    assert hidden is not None
    return hidden
