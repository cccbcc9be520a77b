"""Drafts in the launch of the step before, by whatever reads tokens.

A step's tokens are fed to the reader: those of accepted drafts, and the one behind them. What it
makes of the last gives the first draft, and a draft gives the next, with the noise that the model
itself will have there. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from pippin.backends.base import DecodeRow, PrefillRow, StepPlan
from pippin.backends.mlx.cpu.layers import HeadOperation
from pippin.backends.mlx.cpu.operations import operations
from pippin.backends.mlx.drafts.draft_model import DraftModel
from pippin.backends.mlx.drafts.rings import RingKV, Rings, RingShape, RingStep, SlotRings
from pippin.backends.mlx.step.pending import MLXPending
from pippin.backends.mlx.step.sampler import MLXSampler, noise_words, send
from pippin.backends.step.drafts import MOST_FED, DraftTexts, Missing
from pippin.backends.step.slots import FutureMap, SlotTable

# As `StepDrafter._run` has them.
Entries = tuple[mx.array | None, mx.array, mx.array, mx.array]


@dataclass(frozen=True)
class Ran:
    """Tokens that rows got in a step, and what they were sampled from. By line."""

    slots: np.ndarray  # int32 [width]; 0: no row
    lengths: mx.array  # int32 [width]: tokens that the row held before the step
    hidden: mx.array | None  # [width, n, hidden]: of the input token and of drafts behind it
    tokens: mx.array  # int32 [width, n]: sampled behind these
    counts: mx.array  # int32 [width]: of these how many are behind accepted drafts


class Reader(Protocol):
    """An MTP head, or a model."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def operation(self) -> HeadOperation | None:
        """What reads and drafts all that a step leaves at once, where there is such a one."""
        ...

    def ring_shape(self, max_depth: int) -> RingShape:
        """`max_depth`: drafts of a row."""
        ...

    def read(
        self,
        hidden: mx.array | None,  # [rows, n, hidden]: before each token, where it is known
        tokens: mx.array,  # int32 [rows, n]
        caches: Sequence[RingKV],
        at: mx.array,  # int32 [rows]
    ) -> tuple[mx.array, mx.array | None]:
        """Behind the token `at` of each row: logits [rows, ids], and [rows, 1, hidden]."""
        ...


class StepDrafter:
    """By an MTP head, which is fed what a step sampled and nothing before that."""

    reads_on = False  # whether steps that leave no drafts feed it too

    def __init__(
        self,
        reader: Reader,
        slots: SlotTable[mx.array],
        future_map: FutureMap[mx.array],
        max_depth: int,
    ) -> None:
        self._reader = reader
        assert isinstance(slots.sampler, MLXSampler)
        self._sampler = slots.sampler
        self._slots = slots
        self._future_map = future_map
        self._shape = reader.ring_shape(max_depth)
        self._most_tokens = 1 + max_depth  # of a row in a step
        self.rings = SlotRings(self._shape)
        self._compiled = mx.compile(self._run)

    @property
    def row_bytes(self) -> int:
        return self._shape.nbytes

    def begin(self, plan: StepPlan) -> None:
        """A step is about to run."""

    def prepare(self, rows: Sequence[DecodeRow], is_exact: Callable[[DecodeRow], bool]) -> None:
        """It is about to run these; `is_exact`: the position of a row is."""

    def pass_over(self, rows: Sequence[DecodeRow]) -> None:
        """It has run these, and feeds nothing of them yet."""
        for row in rows:
            self.rings.forget(row.slot)

    def note_sampled(self, step: MLXPending) -> None:
        """All rows of a step have been launched."""

    def forget(self, slot: int) -> None:
        """It ended, or its row is another's now."""
        self.rings.forget(slot)

    def draft_first(self, rows: Sequence[tuple[PrefillRow, mx.array | None]]) -> list[mx.array]:
        """For slots whose first token was sampled, from a hidden vector [1, 1, hidden] each."""
        vectors = [vector for _, vector in rows if vector is not None]
        assert len(vectors) == len(rows), "this model's hidden vectors are not known"
        slots = np.array([row.slot for row, _ in rows], dtype=np.int32)
        lengths = mx.array([row.end - 1 for row, _ in rows], mx.int32)
        tokens = self._future_map.tokens[mx.array(slots)][:, None]
        counts = mx.zeros((len(rows),), mx.int32)
        hidden = mx.concatenate(vectors)
        ran = Ran(slots, lengths, hidden, tokens, counts)
        return self.draft(ran, max(row.num_drafts for row, _ in rows))

    def draft(self, ran: Ran, num_drafts: int) -> list[mx.array]:
        """Feed the tokens, and leave drafts for the next step of each row; all that was written."""
        noise = self._noise(ran, num_drafts)
        rings = self.rings.joined(ran.slots.tolist(), ran.lengths)
        entries = (ran.hidden, ran.tokens, ran.counts, ran.lengths - rings.starts)
        return self._run_rows(ran.slots, rings, entries, noise)

    def _run_rows(
        self,
        rows: np.ndarray,  # int32 [width]: their slots
        rings: Rings,
        entries: Entries,
        noise: mx.array,
    ) -> list[mx.array]:
        slots, num_tokens = rows.tolist(), entries[1].shape[1]
        found: tuple[mx.array, list[Any]]
        if (whole := self._reader.operation) is not None:
            (kv,), (hidden, tokens, counts, first) = rings.kv, entries
            assert hidden is not None, "a head reads hidden vectors"
            how = self._choices(slots), noise, self._shape.num_wrong
            drafts, after = whole.draft(hidden, tokens, counts, first, kv, *how)
            found = drafts, [after]
        elif operations() is not None and num_tokens <= self._most_tokens:
            found = self._compiled(*entries, rings.kv, noise, self._choices(slots))
        else:  # a text that it missed is of any length: no graph is worth keeping
            found = self._run(*entries, rings.kv, noise, None, slots)
        drafts, new_kv = found
        new = Rings(new_kv, rings.starts)
        self.rings.keep(slots, new)
        if noise.shape[1]:
            self._future_map.stash_drafts(send(rows), drafts)
            self._future_map.note_drafts_written(rows, drafts.shape[-1])
        return [drafts, *new.arrays(), *self._future_map.arrays()]

    # ---- one step --------------------------------------------------------------------------

    def _run(
        self,
        hidden: mx.array | None,
        tokens: mx.array,
        counts: mx.array,
        first: mx.array,  # int32 [rows]: the place of the first token
        kv: Sequence[Any],
        noise: mx.array,
        choices: mx.array | None,  # of rows that one operation chooses for, however they do,
        slots: Sequence[int] = (),  # or their slots
    ) -> tuple[mx.array, list[Any]]:
        """int32 [width, as many as there is noise for], and the rings after them."""
        shape, num_drafts = self._shape, noise.shape[1]
        views = [RingKV((k, v), layer) for (k, v), layer in zip(kv, shape.layers, strict=True)]

        def read(
            step: RingStep, hidden: mx.array | None, tokens: mx.array, at: mx.array
        ) -> tuple[mx.array, mx.array | None]:
            for view in views:
                view.step = step
            return self._reader.read(hidden, tokens, views, at)

        numbers = mx.arange(tokens.shape[1])[None]
        newest = (first + counts)[:, None]
        kept = None if tokens.shape[1] == 1 else numbers <= counts[:, None]
        step = RingStep(shape, first[:, None] + numbers, newest, kept)
        logits, last = read(step, hidden, tokens, counts)
        drafts: list[mx.array] = []
        for number in range(num_drafts):
            drafts.append(self._choose(logits, noise[:, number], choices, slots))
            if number + 1 < num_drafts:
                newest = newest + 1
                step = RingStep(shape, newest, newest)
                logits, last = read(step, last, drafts[-1][:, None], mx.zeros_like(counts))
        found = mx.stack(drafts, axis=1) if drafts else mx.zeros((len(tokens), 0), mx.int32)
        return found, [(view.keys, view.values) for view in views]

    def _choose(
        self, logits: mx.array, keys: mx.array, choices: mx.array | None, slots: Sequence[int]
    ) -> mx.array:
        ours = operations()
        if ours is None or choices is None:
            return self._sampler.draw_places(logits, slots, keys)
        tokens: mx.array = ours.choose(logits.astype(mx.float32), choices, keys)
        return tokens

    def _choices(self, slots: Sequence[int]) -> mx.array:
        """float32 [width, 4]: as rows choose their tokens."""
        states = [self._sampler.of(slot) for slot in slots]
        return mx.array([state.choice(self._reader.vocab_size) for state in states], mx.float32)

    def _noise(self, ran: Ran, num_drafts: int) -> mx.array:
        """uint32 [width, drafts, 2]: that of the tokens which the drafts are guesses of."""
        return noise_words(self._slots, ran.slots, ran.lengths + ran.counts + 2, num_drafts)


class ModelDrafter(StepDrafter):
    """By a draft model: what it has yet to read of each request is in step/drafts.py."""

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

    def pass_over(self, rows: Sequence[DecodeRow]) -> None:
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
            ran = Ran(slots, lengths, None, one, one[:, 0])
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
