"""Prompts in the making: what slots hold that have not decoded yet.

Restores what was matched, runs chunks, and adds to a step what it is to sample, keep and check.
Nothing here is launched: the backend decides when.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

import mlx.core as mx
import numpy as np

from pippin.backends.base import PrefillRow
from pippin.backends.chunking import grid_blocks, group_chunks
from pippin.backends.mlx.device import on_cpu
from pippin.backends.mlx.load import LoadedModel
from pippin.backends.mlx.payloads.captures import Captures
from pippin.backends.mlx.prefill.batch import EXACT, ChunkBatch, PromptState
from pippin.backends.mlx.prefill.prompt_scores import MLXPromptScores
from pippin.backends.mlx.recurrent.taps import tap_states
from pippin.backends.mlx.shapes import Exact
from pippin.backends.mlx.step.pending import MLXPending, RecentShapes
from pippin.backends.step.slots import SlotTable
from pippin.types import Component

# Of a layer's prefixes, where rows are padded to the longest: each row's, all of them, and with the
# chunks behind them. They may take half of what activations may.
PREFIX_COPIES = 3

ROW_COMPONENTS = (Component.ATTENTION, Component.WINDOW, Component.STATE)


class Prompts:
    """`shapes`: that forwards may have; `seen`: that they have had."""

    def __init__(
        self,
        loaded: LoadedModel,
        captures: Captures,
        slots: SlotTable[mx.array],
        *,
        shapes: Exact,
        seen: RecentShapes,
        deterministic: bool,
    ) -> None:
        self._loaded = loaded
        self._captures = captures
        self._slots = slots
        self.shapes = shapes
        self._seen = seen
        self._deterministic = deterministic
        self._states: dict[int, PromptState] = {}  # by slot
        self._to_draft: list[tuple[PrefillRow, mx.array | None]] = []
        self._most_prefix_bytes = math.inf  # of a layer
        to_logits = loaded.logits_after if loaded.hidden_bytes else lambda logits: logits
        self.scores = MLXPromptScores(slots, loaded.vocab_size, to_logits)

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, slot: int) -> PromptState:
        return self._states[slot]

    def arrays(self) -> list[mx.array]:
        return [array for state in self._states.values() for array in state.arrays()]

    def fit(self, activation_bytes: float) -> None:
        """Let what forwards make beside prompts take no more than that."""
        self._most_prefix_bytes = activation_bytes / (2 * PREFIX_COPIES)
        self.scores.fit(activation_bytes)

    def start(self, slot: int) -> None:
        self._states[slot] = PromptState()

    def take(self, slot: int) -> PromptState:
        """What the slot holds, for the row that it becomes."""
        return self._states.pop(slot)

    def take_back(self, slot: int, held: PromptState) -> None:
        """What a row holds that several tokens are to be run of at once."""
        self._states[slot] = held

    def take_to_draft(self) -> list[tuple[PrefillRow, mx.array | None]]:
        """Rows that sampled and are to have drafts, and what each sampled from: [1, 1, hidden]."""
        found, self._to_draft = self._to_draft, []
        return found

    def drop(self, slot: int) -> None:
        """A slot that decodes, or whose launch failed, has nothing here."""
        self._states.pop(slot, None)
        self.scores.retire(slot)

    def clear(self) -> None:
        self._states.clear()

    # ---- chunks ----------------------------------------------------------------------------

    def groups(self, chunks: Sequence[PrefillRow]) -> list[list[PrefillRow]]:
        """Those that share a forward."""
        if self._deterministic:  # every block of the absolute grid by itself, always
            return [[block] for chunk in chunks for block in grid_blocks(chunk)]
        pads = self._loaded.layout.pads
        return group_chunks(
            chunks, self.scores.wants, fits=self._prefixes_fit, pads=pads, cpu=on_cpu()
        )

    def run(self, step: MLXPending, chunks: Sequence[PrefillRow]) -> None:
        """One forward."""
        for chunk in chunks:
            step.check_restored(chunk.slot, chunk.restore, ROW_COMPONENTS)
        states = [self._restored(chunk) for chunk in chunks]
        whole = self.scores.wants(chunks[0])
        fits = self._prefixes_fit(len(chunks), max(chunk.start for chunk in chunks))
        batch = ChunkBatch(
            self._loaded.layout,
            [chunk.tokens for chunk in chunks],
            states,
            self.shapes if fits and not whole else EXACT,
        )
        step.note_prefill(is_new=self._seen.add(batch.shape))
        inside = (
            at - chunk.start for chunk in chunks for at in chunk.checkpoints if at != chunk.end
        )
        taps = sorted(set(inside))
        with tap_states(taps) if taps else nullcontext() as tapped:
            at = np.arange(batch.width)[None] if whole else batch.last_positions[:, None]
            logits, hidden = self._run(batch, at)
        if whole:
            logits, hidden = self._score(step, chunks[0], logits, hidden)
        elif logits.shape[1] != 1:  # a head that computes every position
            logits = mx.take_along_axis(logits, mx.array(batch.last_positions)[:, None, None], 1)
        step.check([chunk.slot for chunk in chunks], logits[: len(chunks), -1])
        batch.advance()
        new_kv = batch.new_kv()
        for row, (chunk, prompt) in enumerate(zip(chunks, states, strict=True)):
            if chunk.captures:
                step.keep(self._captures.of_chunk(chunk, row, new_kv, prompt, tapped, hidden))
            if chunk.samples:
                self._sample(step, chunk, logits[row])
                self._read_hidden(step, chunk, hidden, row)
            step.written += prompt.arrays()

    def _run(
        self,
        batch: ChunkBatch,
        positions: np.ndarray,  # int [rows, n]
    ) -> tuple[mx.array, mx.array | None]:
        """Logits of these positions, and what the head reads of them."""
        head = self._loaded.head
        head.positions = mx.array(positions)
        logits = self._loaded.forward(batch.tokens, batch.caches)
        head.positions = None
        return logits, self._loaded.take_hidden()

    def _score(
        self, step: MLXPending, chunk: PrefillRow, logits: mx.array, hidden: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Scores a whole chunk; its last position's logits and hidden vector.

        Where the head can be computed alone, logits of the whole chunk never are.
        """
        self.scores.add(step, chunk, logits if hidden is None else hidden)
        if hidden is None:
            return logits[:, -1:], None
        return self._loaded.logits_after(hidden[:, -1:]), hidden[:, -1:]

    # ---- prompts that are restored whole ---------------------------------------------------

    def restored_groups(self, rows: Sequence[PrefillRow]) -> list[Sequence[PrefillRow]]:
        if self._deterministic:  # a head's product of several rows may round otherwise
            return [[row] for row in rows]
        return [rows] if rows else []

    def sample_restored(self, step: MLXPending, rows: Sequence[PrefillRow]) -> None:
        """The head is all that is computed of them."""
        hidden = mx.concatenate([self._captures.hidden_of(row) for row in rows], axis=0)
        logits = self._loaded.logits_after(hidden)
        step.check([row.slot for row in rows], logits[:, -1])
        for number, row in enumerate(rows):
            step.check_restored(row.slot, row.restore, (Component.HIDDEN,))
            self._sample(step, row, logits[number])
            self._read_hidden(step, row, hidden, number)

    def restore(self, step: MLXPending, rows: Sequence[PrefillRow]) -> None:
        for row in rows:
            step.check_restored(row.slot, row.restore, ROW_COMPONENTS, later=True)
            step.written += self._restored(row).arrays()

    # ---- inside ----------------------------------------------------------------------------

    def _prefixes_fit(self, num_rows: int, prefix_len: int) -> bool:
        """Whether a layer's prefixes may be made as long as that."""
        rows, longest = self.shapes.rows(num_rows), self.shapes.prefix(prefix_len)
        kept = (
            cache.nbytes * min(longest, cache.window or longest)
            for cache in self._loaded.layout.kv_caches
        )
        return rows * max(kept, default=0) <= self._most_prefix_bytes

    def _sample(self, step: MLXPending, row: PrefillRow, logits: mx.array) -> None:
        """The token after a prompt, or after what is known of a reply that goes on."""
        step.add_to_sample([self._slots.sample_row(row)], logits, masked=row.masked)

    def _read_hidden(
        self, step: MLXPending, chunk: PrefillRow, hidden: mx.array | None, row: int
    ) -> None:
        """`hidden` [rows, 1, n]: what the head read; None where that is not known."""
        if chunk.num_drafts:
            own = None if hidden is None else hidden[row : row + 1]
            self._to_draft.append((chunk, own))
        if self._slots[chunk.slot].embeds:
            assert hidden is not None, "this model's hidden vectors are not known"
            step.bring_hidden([chunk.slot], hidden[row].astype(mx.float32))

    def _restored(self, chunk: PrefillRow) -> PromptState:
        prompt = self._states[chunk.slot]
        if chunk.restore is not None:
            self._captures.restore(prompt, chunk.restore)
        assert prompt.length == chunk.start, f"slot {chunk.slot}: chunks must follow each other"
        return prompt
