"""Decode rows that verify drafts, and rows beside them: one forward, and what it accepts.

Whatever a row's length depends on is on the device: the host reads it with the step's result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from pippin.backends.base import DecodeRow
from pippin.backends.torch.drafts.row_drafts import RowDrafts
from pippin.backends.torch.graphs.steps import CapturedSteps
from pippin.backends.torch.models.parts import Linear
from pippin.backends.torch.plain.accept import accepted, noise_words
from pippin.backends.torch.plain.verify import PlainVerify
from pippin.backends.torch.pools.payloads import StatePayload
from pippin.backends.torch.step.decode_inputs import Choice
from pippin.backends.torch.step.parts import StepParts
from pippin.backends.torch.step.pending import TorchPending
from pippin.backends.torch.step.sizes import WIDTHS, width_for
from pippin.backends.torch.step.verify.batch import TakenRows, VerifyBatch, take_rows, verify_batch
from pippin.backends.torch.step.verify.words import (
    MOST_TOKENS,
    VerifySize,
    pack_verify,
    span_for,
)


class Verifies:
    def __init__(
        self,
        parts: StepParts,
        forward: PlainVerify,
        head: Linear,
        steps: CapturedSteps[VerifySize] | None,  # None: plain operations
        max_depth: int,
        drafts: RowDrafts | None = None,  # by the backend itself
    ) -> None:
        self._parts = parts
        self._forward = forward
        self._head = head
        self.steps = steps
        self._max_depth = max_depth
        self._drafts = drafts

    def takes(self, decodes: Sequence[DecodeRow], slots: np.ndarray, positions: np.ndarray) -> bool:
        """Whether one of these rows has drafts, is to leave some for its next step, or had some of
        which the host or its state has yet to learn."""
        rows = self._parts.rows
        exact = rows.is_exact(slots, positions)
        return (
            not exact.all()
            or bool(rows.num_kept[slots].any())
            or any(decode.depth or decode.num_drafts for decode in decodes)
        )

    def run(self, step: TorchPending, decodes: Sequence[DecodeRow]) -> None:
        """In one forward by kernels, or in several, where there are more tokens than one takes."""
        if self.steps is None:
            self._launch(step, decodes)
            return
        alone, together = self._divide(decodes)
        if alone:
            self._launch(step, alone)
        for rows in self._groups(together):
            size = self._size(rows)
            if self.steps.can_run(size):
                self._replay(step, self.steps, rows, size, Choice(int(self._choices(rows).max())))
            else:
                self._launch(step, rows)

    def _launch(self, step: TorchPending, decodes: Sequence[DecodeRow]) -> None:
        """In plain operations."""
        parts = self._parts
        if self._drafts is not None:
            self._drafts.prepare(decodes)
        taken = take_rows(decodes, parts.rows, parts.pools)
        parts.future.note_read(taken.slots)
        batch = verify_batch(taken, parts.rows, parts.future, parts.pools)
        is_known = taken.exact & (taken.depths == 0)
        self._capture(step, taken, is_known)
        hidden = self._forward.hidden(batch)
        logits = self._head(hidden)
        parts.rows.release_passed(taken.slots)
        parts.future.stash_lengths(batch.slots, batch.starts + 1, torch.zeros_like(batch.starts))
        if (known := np.flatnonzero(is_known)).size:
            firsts = np.cumsum(taken.depths + 1) - taken.depths - 1
            rows = [taken.rows[number] for number in known]
            own = logits[parts.pools.index(firsts[known])]
            step.check([row.slot for row in rows], own)
            parts.draws.draw(step, rows, own)
        if not is_known.all():
            self._accept(step, taken, batch, logits, ~is_known)
        if self._drafts is not None:
            self._drafts.behind_tokens(taken, batch, hidden)

    def _choices(self, decodes: Sequence[DecodeRow]) -> np.ndarray:
        """How each row chooses; `LOGITS`: the sampler does it."""
        slots, positions = _places(decodes)
        numbers = self._parts.slots.num_generated(slots, positions + 1)
        choices = self._parts.slots.columns.choices(slots, numbers)
        return np.where([row.masked for row in decodes], Choice.LOGITS, choices)

    def _divide(
        self, decodes: Sequence[DecodeRow]
    ) -> tuple[Sequence[DecodeRow], Sequence[DecodeRow]]:
        """Rows that take plain operations, and rows that kernels run: all but those whose drafts
        the sampler has to accept, or whose length is less sure than a step's words can say."""
        slots, positions = _places(decodes)
        num_unsure = positions - self._parts.rows.least_lengths[slots]
        is_left = self._choices(decodes) == Choice.LOGITS
        has_drafts = (num_unsure > 0) | [row.depth + row.num_drafts > 0 for row in decodes]
        is_alone = (is_left & has_drafts) | (num_unsure > self._max_depth)
        alone, together = (
            [row for row, own in zip(decodes, is_alone.tolist(), strict=True) if own is wanted]
            for wanted in (True, False)
        )
        return alone, together

    def _groups(self, decodes: Sequence[DecodeRow]) -> Iterator[Sequence[DecodeRow]]:
        """As many rows as a graph takes; where that is not all, rows of like depths."""
        if not decodes or self._size(decodes).num_tokens <= MOST_TOKENS:
            yield from [decodes] if decodes else ()
            return
        left = sorted(decodes, key=lambda row: -max(row.depth, row.num_drafts))
        while left:
            width = 1 + max(left[0].depth, left[0].num_drafts)
            most = max(most for most in WIDTHS if most == 1 or most * width <= MOST_TOKENS)
            yield left[:most]
            left = left[most:]

    def _size(self, decodes: Sequence[DecodeRow]) -> VerifySize:
        """Of a graph that runs these rows."""
        depth = max(decode.depth for decode in decodes)
        if num_drafts := max(decode.num_drafts for decode in decodes):
            # Where they differ, drafting begins or its depth changes: no graphs of their own.
            depth = num_drafts = max(depth, num_drafts)
        return VerifySize(width_for(len(decodes)), depth, span_for(self._max_depth), num_drafts)

    def _replay(
        self,
        step: TorchPending,
        steps: CapturedSteps[VerifySize],
        decodes: Sequence[DecodeRow],
        size: VerifySize,
        choice: Choice,
    ) -> None:
        """One copy and one replay; then the sampler draws for rows that are left to it."""
        parts = self._parts
        is_left = self._choices(decodes) == Choice.LOGITS
        (left,), (drawn,) = np.nonzero(is_left), np.nonzero(~is_left)
        rows, others = ([decodes[at] for at in places.tolist()] for places in (drawn, left))
        if self._drafts is not None:
            self._drafts.pass_over(others)
            self._drafts.prepare(rows)
        taken = take_rows(decodes, parts.rows, parts.pools, send=False)
        parts.future.note_read(taken.slots)
        self._capture(step, taken, is_left)
        waste_cell = parts.pools.layout.waste_cell
        words = pack_verify(size, taken, parts.rows, parts.slots, waste_cell, is_left)
        ran = steps.run(size, words, choice)
        parts.future.note_written(np.array([row.slot for row in rows if row.samples], dtype=int))
        for row in rows:
            if row.drafted:
                parts.future.note_drafts_read(row.slot, row.depth)
            if row.num_drafts:
                parts.future.note_drafts_written(np.array([row.slot]), row.num_drafts)
        index, slots = parts.pools.index, taken.slots[drawn]
        of_rows = ran.drawn[:, : len(decodes)].T
        found = of_rows[index(drawn)] if len(left) else of_rows.clone()
        read = partial(self._read, step, rows, slots, parts.rows.lives(slots))
        step.read_later(parts.streams.bring([found]), read)
        if len(left):
            assert ran.logits is not None
            logits = ran.logits[index(left)]
            step.check(taken.slots[left].tolist(), logits)
            parts.draws.draw(step, others, logits)

    def fold(self, slot: int, end: int) -> None:
        """Run what is kept of a row's accepted drafts, so that its state is that at `end`."""
        parts = self._parts
        most = int(parts.rows.num_kept[slot])
        if not most or not parts.rows.keeps_states:
            return
        slots = np.array([slot])
        parts.pools.arena.make_room(0, parts.rows.num_new_states(slots))
        states = map(parts.pools.index, parts.rows.next_states(slots))
        owner = parts.pools.index(slots)
        held_at = parts.future.lengths[owner] - parts.future.counts[owner]  # by the state
        self._forward.fold(owner, end - held_at.long(), most, *states)

    def _capture(self, step: TorchPending, taken: TakenRows, is_known: np.ndarray) -> None:
        """States behind input tokens; where those are is known at once, or with the result."""
        parts = self._parts
        wanted = [
            (row, known)
            for row, known in zip(taken.rows, is_known.tolist(), strict=True)
            if row.checkpoint and parts.rows.keeps_states
        ]
        step.captures += parts.captures.of_decodes([row for row, known in wanted if known])
        step.checkpoints |= {
            row.slot: StatePayload.of(parts.pools, int(parts.rows.states[row.slot]))
            for row, known in wanted
            if not known
        }

    def _accept(
        self,
        step: TorchPending,
        taken: TakenRows,
        batch: VerifyBatch,
        logits: torch.Tensor,
        verified: np.ndarray,  # bool [rows]
    ) -> None:
        """Draw behind each token of these rows, and take on what equals the next draft."""
        parts, index = self._parts, self._parts.pools.index
        numbers = np.flatnonzero(verified)
        rows, slots = [taken.rows[number] for number in numbers], taken.slots[numbers]
        owners = np.repeat(np.arange(len(taken.rows)), taken.depths + 1)
        tokens = np.flatnonzero(verified[owners])
        token_slots = taken.slots[owners[tokens]]
        at, own, device_slots = index(tokens), index(numbers), index(slots)
        own_logits = logits if verified.all() else logits[at]
        keys = noise_words(
            index(parts.slots.streams[token_slots].view(np.int64)),
            batch.positions[at] + 1 - index(parts.slots.prompt_lens[token_slots]),
        )
        drawn = parts.slots.sampler.draw_places(own_logits, token_slots.tolist(), keys)
        padded = torch.zeros(2, len(taken.rows) * batch.width, dtype=torch.int32, device=at.device)
        padded[0, batch.places[at]] = drawn
        padded[1, batch.places[at]] = own_logits[:, 0].isnan().int()
        drawn, is_nan = padded.view(2, -1, batch.width)[:, own]
        counts = accepted(drawn, batch.drafts[own], index(parts.slots.stop_ids[slots]))
        starts = batch.starts[own]
        parts.future.stash_lengths(device_slots, starts + 1 + counts, counts)
        sampling = np.flatnonzero([row.samples for row in rows])
        last = drawn.gather(1, counts[:, None])[index(sampling)]
        parts.future.stash(device_slots[index(sampling)], last)
        parts.future.note_written(slots[sampling])
        behind = torch.arange(batch.width, device=at.device) > counts[:, None]
        overflowed = is_nan.masked_fill(behind, 0).amax(dim=1)
        found = torch.cat([torch.stack([counts, starts, overflowed], dim=1), drawn], dim=1).int()
        read = partial(self._read, step, rows, slots, parts.rows.lives(slots))
        step.read_later(parts.streams.bring([found]), read)

    def _read(
        self,
        step: TorchPending,
        rows: Sequence[DecodeRow],
        slots: np.ndarray,
        lives: np.ndarray,
        found: torch.Tensor,  # int32 [rows, 3 + width]
    ) -> None:
        lines = found.numpy()
        self._parts.rows.note_accepted(slots, lives, lines[:, 0])
        step.read_overflows(slots.tolist(), lines[:, 2])
        for row, (count, start, _, *drawn) in zip(rows, lines.tolist(), strict=True):
            if row.samples:
                step.tokens[row.slot] = tuple(drawn[: count + 1])
            step.keep_checkpoint(row.slot, start + 1)


def _places(decodes: Sequence[DecodeRow]) -> tuple[np.ndarray, np.ndarray]:
    """Slots and positions."""
    slots = np.array([decode.slot for decode in decodes])
    return slots, np.array([decode.position for decode in decodes])
