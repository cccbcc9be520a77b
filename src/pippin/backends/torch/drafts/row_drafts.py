"""Drafts behind the rows of a step, left in the future map for their next ones.

Whatever a step accepted or sampled is read on the device; the host knows which rows it has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pippin.backends.base import Admit, DecodeRow, PrefillRow
from pippin.backends.step.drafts import (
    MOST_FED,
    MOST_TOKENS,
    DraftTexts,
    Missing,
    Row,
    is_drafted,
)
from pippin.backends.torch.drafts.drafters import (
    PLAIN,
    Entered,
    Entries,
    LayerOperations,
    ModelDrafter,
    MtpDrafter,
    RunLayers,
    StepDrafter,
    run_plain,
)
from pippin.backends.torch.models.decoder import Decoder, Mix
from pippin.backends.torch.plain.forward import noise_words
from pippin.backends.torch.step.batches import DecodeBatch, TakenRows
from pippin.backends.torch.step.parts import StepParts
from pippin.backends.torch.step.pending import TorchPending


class RowDrafts:
    """By an MTP head, which is fed with what a step computes; what is not fed is not seen."""

    def __init__(self, parts: StepParts, drafter: StepDrafter) -> None:
        self._parts = parts
        self._drafter = drafter

    def start(self, admit: Admit) -> None:
        """A slot has another request."""
        self._drafter.ring.start(admit.slot)

    def prepare(self, rows: Sequence[DecodeRow]) -> None:
        """A step is about to run these, and its tokens will be fed."""

    def pass_over(self, rows: Sequence[DecodeRow]) -> None:
        """A step runs these, and its tokens are not fed."""

    def note_sampled(self, step: TorchPending) -> None:
        """All rows of a step have been launched."""

    def run_largest(self) -> None:
        """What takes the most memory, for no slot, beside the tokens of any step."""

    def behind_chunks(self, rows: Sequence[PrefillRow], hidden: torch.Tensor | None) -> None:
        """Of chunks, one behind the other, whose ends the head remembers. hidden [tokens, n], if
        is known."""
        assert hidden is not None
        index, future = self._parts.pools.index, self._parts.future
        slots, positions, tokens, at, ends, first = [], [], [], [], [], 0
        for row in rows:
            num_new = len(row.tokens)
            end = num_new if is_drafted(row) else num_new - 1  # what follows has to be known
            start = max(end - self._drafter.ring.length, 0)
            following = np.append(row.tokens[1:], 0)[start:end]
            tokens.append(following)
            slots.append(np.full(len(following), row.slot))
            positions.append(np.arange(row.start + start, row.start + end))
            at.append(np.arange(first + start, first + end))
            ends.append(sum(map(len, tokens)) - 1)
            first += num_new
        owners = np.concatenate(slots)
        if not len(owners):
            return
        device_tokens = index(np.concatenate(tokens))
        sampled = [number for number, row in enumerate(rows) if is_drafted(row)]
        last = index(np.array([ends[number] for number in sampled]))
        sampled_slots = index(np.array([rows[number].slot for number in sampled]))
        device_tokens[last] = future.tokens[sampled_slots].long()
        where = index(np.concatenate(positions))
        every = index(owners)  # each an entry by itself: none attends before its row's last
        known = hidden[index(np.concatenate(at))]
        entered = self._drafter.feed(Entries(every, every, where, device_tokens, known))
        own = [rows[number] for number in sampled]
        bound = max((row.end for row in own), default=0)
        self._draft(own, entered, last, where[last], bound)

    def behind_restored(self, rows: Sequence[PrefillRow], hidden: torch.Tensor) -> None:
        """Of prompts that were restored whole; hidden [rows, n]: the last tokens' own."""
        index = self._parts.pools.index
        slots = np.array([row.slot for row in rows])
        positions = np.array([row.end - 1 for row in rows])
        samples = np.array([is_drafted(row) for row in rows])
        device_slots, where = index(slots * samples), index(positions)
        tokens = self._parts.future.tokens[device_slots].long()
        entered = self._drafter.feed(Entries(device_slots, device_slots, where, tokens, hidden))
        last = torch.arange(len(rows), device=where.device)
        self._draft(rows, entered, last, where, int(positions.max()))

    def behind_tokens(self, taken: TakenRows, batch: DecodeBatch, hidden: torch.Tensor) -> None:
        """Of rows that decode and have accepted and sampled; hidden [tokens, n]."""
        index, future = self._parts.pools.index, self._parts.future
        counts, sampled = future.counts[batch.slots].long(), future.tokens[batch.slots].long()
        place = torch.arange(batch.width, device=counts.device)
        known = torch.cat([batch.drafts.long(), sampled[:, None]], dim=1)
        following = torch.where(place < counts[:, None], known, sampled[:, None])
        samples = index(np.array([is_drafted(row) for row in taken.rows])) > 0
        is_kept = (place <= counts[:, None]) & samples[:, None]
        slots = torch.where(is_kept, batch.slots[:, None], 0)
        packed = np.zeros(len(taken.rows) * batch.width, dtype=np.int64)
        packed[taken.places] = np.arange(len(taken.places))
        positions = batch.starts[:, None] + place
        bound = int((taken.positions + taken.depths).max())
        entered = self._drafter.feed(
            Entries(
                batch.slots,
                slots.flatten(),
                positions.flatten(),
                following.flatten(),
                hidden[index(packed)],
            ),
            bound,
        )
        firsts = index(np.arange(len(taken.rows)) * batch.width)
        self._draft(taken.rows, entered, firsts + counts, batch.starts + counts, bound)

    def _draft(
        self,
        rows: Sequence[Row],
        entered: Entered,
        last: torch.Tensor,  # int64 [rows]: their last entries
        positions: torch.Tensor,  # int64 [rows]: of these
        bound: int,  # of any position
    ) -> None:
        """For those that ask for drafts."""
        parts, index = self._parts, self._parts.pools.index
        asking = [n for n, row in enumerate(rows) if row.num_drafts and is_drafted(row)]
        if not asking:
            return
        num_drafts = max(rows[number].num_drafts for number in asking)
        slots = np.array([rows[number].slot for number in asking])
        streams = index(parts.slots.streams[slots].view(np.int64))
        prompt_lens = index(parts.slots.prompt_lens[slots])

        def choose(logits: torch.Tensor, of_tokens: torch.Tensor) -> torch.Tensor:
            keys = noise_words(streams, of_tokens - prompt_lens)
            return parts.slots.sampler.draw_places(logits, slots.tolist(), keys)

        chosen, device_slots = index(np.array(asking)), index(slots)
        drafts = self._drafter.draft(
            entered.at(last[chosen]),
            device_slots,
            positions[chosen],
            num_drafts,
            choose,
            bound,
        )
        parts.future.stash_drafts(device_slots, drafts)
        for number in asking:
            row = rows[number]
            parts.future.note_drafts_written(np.array([row.slot]), row.num_drafts)


class TextDrafts(RowDrafts):
    """By a model of its own: what it has yet to read of each request is in step/drafts.py."""

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


def make_drafts(
    parts: StepParts, decoder: Decoder, draft: Decoder | None, num_slots: int, *, kernels: bool
) -> tuple[RowDrafts, StepDrafter] | None:
    """A draft model, or the MTP head of the checkpoint."""
    operations: LayerOperations = PLAIN
    run: RunLayers = run_plain
    if kernels:  # Triton is not everywhere
        from pippin.backends.torch.kernels.layers import feed_forward, run_layers
        from pippin.backends.torch.kernels.rows import norm_rows

        operations = LayerOperations(norm_rows, feed_forward)

        def run_kernels(decoder: Decoder, tokens: torch.Tensor, mix: Mix) -> torch.Tensor:
            return run_layers(decoder, decoder.embedded(tokens), mix)

        run = run_kernels
    if draft is not None:
        model = ModelDrafter(draft, decoder.shape.vocab_size, num_slots, run)
        return TextDrafts(parts, model), model
    if decoder.mtp is None:
        return None
    head = MtpDrafter(decoder, decoder.mtp, num_slots, operations)
    return RowDrafts(parts, head), head
