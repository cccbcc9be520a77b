"""The rows of a plan in as few forwards as there can be: decode rows, drafts, chunks of prompts.

    decode rows   one token each; with drafts to verify, each its own number of them
    chunks        those that share a room; of models without recurrent layers beside decode rows

Each forward is a replay where that is captured, else launched over kernels, else in plain
operations. Prefixes are restored before, tokens are drawn behind. Whatever the length of a row with
drafts depends on is on the device: the host reads it with the step's result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from pippin.backends.base import DecodeRow, PrefillRow, Restore, StepPlan, WarmUpShape
from pippin.backends.chunking import cut_chunk, grid_blocks
from pippin.backends.torch.drafts.row_drafts import RowDrafts
from pippin.backends.torch.graphs.capture import CudaGraphs
from pippin.backends.torch.graphs.steps import CapturedSteps, Ran
from pippin.backends.torch.plain.forward import PlainForward, accepted, noise_words
from pippin.backends.torch.pools.layout import ZERO_SLAB
from pippin.backends.torch.pools.payloads import HiddenPayload, KVPayload, StatePayload
from pippin.backends.torch.prompt_scores import TorchPromptScores
from pippin.backends.torch.step import words as sizes
from pippin.backends.torch.step.batches import (
    DecodeBatch,
    TakenChunks,
    TakenRows,
    chunk_batch,
    decode_batch,
    inner_checkpoints,
    take_chunks,
    take_rows,
)
from pippin.backends.torch.step.decode_inputs import Choice
from pippin.backends.torch.step.parts import StepParts
from pippin.backends.torch.step.pending import TorchPending
from pippin.backends.torch.step.words import (
    MIXED_ROOMS,
    MIXED_WIDTHS,
    MOST_VERIFIED,
    ROOMS,
    WIDTHS,
    StepSize,
    StepWords,
    group_by_room,
    launched,
    mixed_size_for,
    room_for,
    span_for,
    width_for,
)
from pippin.types import Component

_NO_CELLS = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Ways:
    """How steps are run."""

    num_slots: int
    max_len: int
    prefill_tokens: int  # of the largest step
    deterministic: bool
    kernels: bool  # Triton's
    chunk_kernels: bool  # those of prompts, too
    draft_kernels: bool  # and those of steps with drafts
    recorder: CudaGraphs | None  # captures what is made of them; None: on GPUs CUDA graphs do
    chunk_graphs: bool
    mixed: bool  # decode rows beside chunks in one forward
    fingerprints: bool
    max_depth: int  # drafts of a row
    drafts_itself: bool

    def num_graphs(self) -> int:
        """That there can be."""
        if not self.kernels:
            return 0
        shapes = self.shapes_to_warm_up()
        drafted = [shape for shape in shapes if shape.depth]
        num_sizes = len(shapes) + self.drafts_itself * len(drafted)  # with drafts left, without
        if drafted:
            num_sizes += len(self._widths)  # of steps without drafts, behind some
        return len(Choice) * num_sizes

    def shapes_to_warm_up(self) -> list[WarmUpShape]:
        if not self.kernels:
            return []
        shapes = [WarmUpShape(num_rows, num_tokens=1, num_steps=1) for num_rows in self._widths]
        for room in ROOMS if self.chunk_graphs else ():
            num_rows = room.least_chunks
            if num_rows <= self.num_slots:
                shapes.append(WarmUpShape(num_rows, num_tokens=room.num_tokens // num_rows))
        if self.mixed:
            shapes += self._mixed_shapes()
        if not self.draft_kernels:
            return shapes
        return shapes + [
            WarmUpShape(num_rows, 1, num_steps=3, depth=depth, drafts_itself=self.drafts_itself)
            for num_rows in self._widths
            for depth in range(1, self.max_depth + 1)
            if width_for(num_rows) * (1 + depth) <= MOST_VERIFIED
        ]

    def _mixed_shapes(self) -> list[WarmUpShape]:
        """One chunk in each room beside rows of each width."""
        most = self.num_slots - 1
        narrower = zip(MIXED_WIDTHS, (0, *MIXED_WIDTHS), strict=False)
        beside = [min(width, most) for width, less in narrower if less < most]
        return [
            WarmUpShape(1, num_tokens=room.num_tokens, beside=num)
            for num in beside
            for room in MIXED_ROOMS
        ]

    @property
    def _widths(self) -> list[int]:
        """Rows of decode steps, of each width."""
        most = width_for(self.num_slots)
        return [min(width, self.num_slots) for width in WIDTHS if width <= most]

    def largest_sizes(self) -> list[StepSize]:
        """Of each kind that can be captured. Of steps behind some with drafts, those that are
        wider than any that has drafts."""
        if not self.kernels:
            return []
        sizes = [StepSize(width_for(self.num_slots))]
        if self.chunk_graphs:
            sizes.append(ROOMS[-1])
        if self.mixed:
            num_decodes = min(self.num_slots - 1, MIXED_WIDTHS[-1])
            size = mixed_size_for(num_decodes, MIXED_ROOMS[-1].num_tokens, 1)
            sizes += [] if size is None else [size]
        if self.draft_kernels and (depth := self.max_depth):
            span, widths = span_for(depth), [width_for(num) for num in self._widths]
            sizes += [StepSize(width, 0, span) for width in widths if 2 * width > MOST_VERIFIED]
            width = max(width for width in WIDTHS if width * (1 + depth) <= MOST_VERIFIED)
            sizes.append(StepSize(width, depth, span, depth if self.drafts_itself else 0))
        return sizes

    @property
    def kinds(self) -> frozenset[str]:
        """Of steps that are run by kernels (`StepSize.kind`)."""
        known = {
            StepSize(1): self.kernels,
            ROOMS[0]: self.chunk_kernels,
            MIXED_ROOMS[0]._replace(num_rows=1): self.mixed,
            StepSize(1, span=1): self.draft_kernels and self.max_depth > 0,
        }
        return frozenset(size.kind for size, has_kernels in known.items() if has_kernels)


class Forwards:
    def __init__(
        self,
        parts: StepParts,
        plain: PlainForward,
        steps: CapturedSteps | None,  # None: plain operations
        ways: Ways,
        drafts: RowDrafts | None = None,  # by the backend itself
    ) -> None:
        self._parts = parts
        self._plain = plain
        self._head = plain.decoder.head
        self.steps = steps
        self.kinds = ways.kinds
        self.chunk_graphs = ways.chunk_graphs
        self._ways = ways
        self._drafts = drafts
        self._scores = TorchPromptScores(parts, self._head, pads=self.chunk_graphs)

    def retire(self, slot: int) -> None:
        self._scores.retire(slot)

    def run(self, step: TorchPending, plan: StepPlan) -> None:
        groups, decodes = self._begin_prompts(step, plan.prefill), plan.decode
        sized = self._mixed_size(decodes, groups[0]) if decodes and groups else None
        if sized is not None:
            self._replay_both(step, decodes, groups.pop(0), *sized)
        elif self._ways.deterministic:  # so that no row's company matters
            for decode in decodes:
                self._run_decodes(step, [decode])
        elif decodes:
            self._run_decodes(step, decodes)
        for chunks in groups:
            self._run_chunks(step, chunks)

    def _steps_of(self, kind: str) -> CapturedSteps | None:
        return self.steps if kind in self.kinds else None

    # ---- decode rows and chunks in one forward ---------------------------------------------

    def _mixed_size(
        self, decodes: Sequence[DecodeRow], chunks: Sequence[PrefillRow]
    ) -> tuple[StepSize, Choice] | None:
        """Of a graph that runs these, if there is one, and how it chooses."""
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        size = mixed_size_for(len(decodes), num_tokens, len(chunks))
        if size is None or (steps := self._steps_of(size.kind)) is None:
            return None
        slots = self._parts.slots
        choice = max(slots.choice_of(decodes), slots.choice_of(chunks))
        choice = max(choice, Choice.DRAWN)  # greedy rows may take that too
        left = choice is Choice.LOGITS or self._verifies(decodes)
        return None if left or not steps.has(size, choice) else (size, choice)

    def _replay_both(
        self,
        step: TorchPending,
        decodes: Sequence[DecodeRow],
        chunks: Sequence[PrefillRow],
        size: StepSize,
        choice: Choice,
    ) -> None:
        assert self.steps is not None
        num_cells, num_states = self._room_of(chunks)
        self._parts.pools.arena.make_room(len(decodes) + num_cells, num_states)
        rows, taken = self._take_known(step, decodes), self._take_chunks(step, chunks)
        words = StepWords(size, self._parts.pools.layout)
        words.put_rows(rows, self._parts.slots)
        self._put_chunks(words, taken)
        ran = self.steps.run(size, words.words, choice)
        self._parts.draws.take_drawn(step, decodes, Ran(ran.drawn[:, : size.num_rows]))
        self._take_ran(step, chunks, replace(ran, drawn=ran.drawn[:, size.num_rows :]))
        step.forwards = replace(step.forwards, prefill=step.forwards.prefill + 1)

    # ---- decode rows -----------------------------------------------------------------------

    def _verifies(self, decodes: Sequence[DecodeRow]) -> bool:
        """Whether one of these rows has drafts, is to leave some for its next step, or had some of
        which the host or its state has yet to learn."""
        slots, positions = _places(decodes)
        rows = self._parts.rows
        return (
            not rows.is_exact(slots, positions).all()
            or bool(rows.num_kept[slots].any())
            or any(decode.depth or decode.num_drafts for decode in decodes)
        )

    def _run_decodes(self, step: TorchPending, decodes: Sequence[DecodeRow]) -> None:
        """In one forward by kernels, or in several, where there are more tokens than one takes."""
        verifies = self._verifies(decodes)
        size = self._verified_size(decodes) if verifies else StepSize(width_for(len(decodes)))
        if (steps := self._steps_of(size.kind)) is None:
            self._launch_rows(step, decodes)
        elif verifies:
            alone, together = self._divide(decodes)
            if alone:
                self._launch_rows(step, alone)
            for rows in self._groups(together):
                size = self._verified_size(rows)
                if steps.can_run(size):
                    self._replay_verified(step, steps, rows, size)
                else:
                    self._launch_rows(step, rows)
        elif steps.can_run(size):
            self._replay_rows(step, steps, decodes, size)
        else:
            self._launch_rows(step, decodes)

    def _take_known(self, step: TorchPending, decodes: Sequence[DecodeRow]) -> TakenRows:
        """Rows whose lengths are known, each with one token, which a step over kernels runs."""
        if self._drafts is not None:
            self._drafts.pass_over(decodes)
        taken = take_rows(decodes, self._parts.rows, self._parts.pools, send=False)
        self._parts.future.note_read(taken.slots)
        step.captures += self._parts.captures.of_decodes(decodes)
        return taken

    def _replay_rows(
        self, step: TorchPending, steps: CapturedSteps, decodes: Sequence[DecodeRow], size: StepSize
    ) -> None:
        """One copy and one replay, unless a row needs the sampler."""
        taken = self._take_known(step, decodes)
        words = StepWords(size, self._parts.pools.layout)
        words.put_rows(taken, self._parts.slots)
        ran = steps.run(size, words.words, self._parts.slots.choice_of(decodes))
        self._parts.draws.take_drawn(step, decodes, ran)

    def _launch_rows(self, step: TorchPending, decodes: Sequence[DecodeRow]) -> None:
        """In plain operations."""
        parts, drafts = self._parts, self._drafts
        feeds = self._verifies(decodes)
        if drafts is not None:
            (drafts.prepare if feeds else drafts.pass_over)(decodes)
        taken = take_rows(decodes, parts.rows, parts.pools)
        parts.future.note_read(taken.slots)
        batch = decode_batch(taken, parts.rows, parts.future, parts.pools)
        is_known = taken.exact & (taken.depths == 0)
        self._capture_states(step, taken, is_known)
        hidden = self._plain.hidden(batch)
        logits = self._head(hidden)
        parts.rows.release_passed(taken.slots)
        if feeds:
            none = torch.zeros_like(batch.starts)
            parts.future.stash_lengths(batch.slots, batch.starts + 1, none)
        if (known := np.flatnonzero(is_known)).size:
            firsts = np.cumsum(taken.depths + 1) - taken.depths - 1
            rows = [taken.rows[number] for number in known]
            own = logits if is_known.all() else logits[parts.pools.index(firsts[known])]
            self._sample(step, rows, own)
        if not is_known.all():
            self._accept(step, taken, batch, logits, ~is_known)
        if drafts is not None and feeds:
            drafts.behind_tokens(taken, batch, hidden)

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
        is_alone = (is_left & has_drafts) | (num_unsure > self._ways.max_depth)
        alone, together = (
            [row for row, own in zip(decodes, is_alone.tolist(), strict=True) if own is wanted]
            for wanted in (True, False)
        )
        return alone, together

    def _groups(self, decodes: Sequence[DecodeRow]) -> Iterator[Sequence[DecodeRow]]:
        """As many rows as a graph takes; where that is not all, rows of like depths."""
        if not decodes or self._verified_size(decodes).num_placed <= sizes.MOST_VERIFIED:
            yield from [decodes] if decodes else ()
            return
        left = sorted(decodes, key=lambda row: -max(row.depth, row.num_drafts))
        while left:
            width = 1 + max(left[0].depth, left[0].num_drafts)
            most = max(n for n in WIDTHS if n == 1 or n * width <= sizes.MOST_VERIFIED)
            yield left[:most]
            left = left[most:]

    def _verified_size(self, decodes: Sequence[DecodeRow]) -> StepSize:
        """Of a graph that runs these rows."""
        depth = max(decode.depth for decode in decodes)
        if num_drafts := max(decode.num_drafts for decode in decodes):
            # Where they differ, drafting begins or its depth changes: no graphs of their own.
            depth = num_drafts = max(depth, num_drafts)
        return StepSize(width_for(len(decodes)), depth, span_for(self._ways.max_depth), num_drafts)

    def _replay_verified(
        self, step: TorchPending, steps: CapturedSteps, decodes: Sequence[DecodeRow], size: StepSize
    ) -> None:
        """One copy and one replay; then the sampler draws for rows that are left to it."""
        parts, choices = self._parts, self._choices(decodes)
        is_left = choices == Choice.LOGITS
        (left,), (drawn,) = np.nonzero(is_left), np.nonzero(~is_left)
        rows, others = ([decodes[at] for at in places.tolist()] for places in (drawn, left))
        if self._drafts is not None:
            self._drafts.pass_over(others)
            self._drafts.prepare(rows)
        taken = take_rows(decodes, parts.rows, parts.pools, send=False)
        parts.future.note_read(taken.slots)
        self._capture_states(step, taken, is_left)
        words = StepWords(size, parts.pools.layout)
        words.put_verified(taken, parts.rows, parts.slots, is_left)
        ran = steps.run(size, words.words, Choice(int(choices.max())))
        parts.future.note_written(np.array([row.slot for row in rows if row.samples], dtype=int))
        for row in rows:
            if row.drafted:
                parts.future.note_drafts_read(row.slot, row.depth)
            if row.num_drafts:
                parts.future.note_drafts_written(np.array([row.slot]), row.num_drafts)
        index = parts.pools.index
        of_rows = ran.drawn[:, : len(decodes)].T
        found = of_rows[index(drawn)] if len(left) else of_rows.clone()
        self._read_later(step, rows, found)
        if len(left):
            assert ran.logits is not None
            self._sample(step, others, ran.logits[index(left)])

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
        self._plain.fold(owner, end - held_at.long(), most, *states)

    def _capture_states(self, step: TorchPending, taken: TakenRows, is_known: np.ndarray) -> None:
        """Behind input tokens; where those are is known at once, or with the result."""
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
        batch: DecodeBatch,
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
        self._read_later(step, rows, found)

    def _read_later(
        self,
        step: TorchPending,
        rows: Sequence[DecodeRow],
        found: torch.Tensor,  # int32 [rows, 3 + width]
    ) -> None:
        parts, slots = self._parts, np.array([row.slot for row in rows], dtype=np.int64)
        lives = parts.rows.lives(slots)

        def read(found: torch.Tensor) -> None:
            lines = found.numpy()
            parts.rows.note_accepted(slots, lives, lines[:, 0])
            step.read_overflows(slots.tolist(), lines[:, 2])
            for row, (count, start, _, *drawn) in zip(rows, lines.tolist(), strict=True):
                if row.samples:
                    step.tokens[row.slot] = tuple(drawn[: count + 1])
                step.keep_checkpoint(row.slot, start + 1)

        step.read_later(parts.streams.bring([found]), read)

    # ---- prompts ---------------------------------------------------------------------------

    def _begin_prompts(
        self, step: TorchPending, rows: Sequence[PrefillRow]
    ) -> list[Sequence[PrefillRow]]:
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
        return self._chunk_groups([row for row in rows if len(row.tokens)])

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
        for group in (
            [[row] for row in rows] if self._ways.deterministic else [rows] if rows else []
        ):
            hidden = torch.stack([_hidden_of(row) for row in group])
            self._read_hidden(step, group, hidden)
            # As many rows as a decode step has: a product of another size may be the first.
            num_rows = len(hidden)
            padding = width_for(max(num_rows, 2)) - num_rows if self.chunk_graphs else 0
            logits = self._head(F.pad(hidden, (0, 0, 0, padding)))[:num_rows]
            self._sample(step, group, logits)
            if self._drafts is not None:
                self._drafts.behind_restored(group, hidden)

    def _chunk_groups(self, chunks: Sequence[PrefillRow]) -> list[Sequence[PrefillRow]]:
        if self._ways.deterministic:  # every block of the absolute grid by itself, always
            return [[block] for chunk in chunks for block in grid_blocks(chunk)]
        if self.chunk_graphs and self.steps is not None and self.steps.works(ROOMS[-1]):
            return [*group_by_room(chunks)]
        most = self._ways.prefill_tokens
        if self._parts.rows.windows is None or all(len(chunk.tokens) <= most for chunk in chunks):
            return [chunks] if chunks else []
        # No row may hold more of a window than `row_bytes` says.
        parts = [cut_chunk(chunk, range(chunk.start + most, chunk.end, most)) for chunk in chunks]
        return [
            [part for part in parts_now if part is not None] for parts_now in zip_longest(*parts)
        ]

    def _room_of(self, chunks: Sequence[PrefillRow]) -> tuple[int, int]:
        """Cells and states that they will take."""
        rows, slots = self._parts.rows, np.array([chunk.slot for chunk in chunks])
        num_taps = sum(len(inner_checkpoints(chunk)) for chunk in chunks)
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        return num_tokens, rows.num_new_states(slots) + num_taps * rows.keeps_states

    def _take_chunks(self, step: TorchPending, chunks: Sequence[PrefillRow]) -> TakenChunks:
        taken = take_chunks(chunks, self._parts.rows, self._parts.pools)
        step.captures += self._parts.captures.of_chunks(taken)
        return taken

    def _put_chunks(self, words: StepWords, taken: TakenChunks) -> Choice:
        words.put_chunks(taken, self._parts.rows)
        return self._parts.slots.fill_samples(words.samples, taken.rows)

    def _run_chunks(self, step: TorchPending, chunks: Sequence[PrefillRow]) -> None:
        """Chunks that share a forward."""
        self._parts.pools.arena.make_room(*self._room_of(chunks))
        taken = self._take_chunks(step, chunks)
        num_tokens = sum(len(chunk.tokens) for chunk in chunks)
        size = launched(num_tokens, len(chunks))
        steps = self._steps_of(size.kind)
        room = room_for(num_tokens, len(chunks)) if self.chunk_graphs else None
        if steps is None or (room is not None and not steps.can_run(room)):
            self._launch_chunks(step, taken)
        else:
            run = steps.launch
            if room is not None and steps.works(room):
                run, size = steps.run, room
            words = StepWords(size, self._parts.pools.layout)
            choice = self._put_chunks(words, taken)
            self._take_ran(step, chunks, run(size, words.words, choice))
        step.forwards = replace(step.forwards, prefill=step.forwards.prefill + 1)

    def _take_ran(self, step: TorchPending, chunks: Sequence[PrefillRow], ran: Ran) -> None:
        """What a step over kernels made of these."""
        assert ran.last is not None
        assert ran.every is not None
        self._score(step, chunks, ran.every)
        self._keep_hidden(step, chunks, ran.last)
        self._parts.draws.take_drawn(step, chunks, ran)
        if self._drafts is not None:
            self._drafts.behind_chunks(chunks, ran.every)

    def _launch_chunks(self, step: TorchPending, taken: TakenChunks) -> None:
        """In plain operations."""
        parts, chunks = self._parts, taken.rows
        batch = chunk_batch(taken, parts.rows, parts.pools)
        hidden = self._plain.hidden(batch)
        parts.rows.release_passed(taken.slots)
        self._score(step, chunks, hidden)
        last = hidden[batch.last]
        self._keep_hidden(step, chunks, last)
        self._sample(step, chunks, self._head(last))
        if self._drafts is not None:
            self._drafts.behind_chunks(chunks, hidden)

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

    def _sample(
        self,
        step: TorchPending,
        rows: Sequence[DecodeRow | PrefillRow],
        logits: torch.Tensor,
    ) -> None:
        """By the sampler."""
        step.check([row.slot for row in rows], logits)
        self._parts.draws.draw(step, rows, logits)


Kind = TypeVar("Kind", KVPayload, StatePayload, HiddenPayload)


def _of(kind: type[Kind], restore: Restore, component: Component) -> list[Kind]:
    found = restore.payloads.get(component, ())
    return [payload for payload in found if isinstance(payload, kind)]


def _hidden_of(row: PrefillRow) -> torch.Tensor:
    assert row.restore is not None
    hidden = _of(HiddenPayload, row.restore, Component.HIDDEN)[-1].hidden
    assert hidden is not None
    return hidden


def _places(decodes: Sequence[DecodeRow]) -> tuple[np.ndarray, np.ndarray]:
    """Slots and positions."""
    slots = np.array([decode.slot for decode in decodes])
    return slots, np.array([decode.position for decode in decodes])
