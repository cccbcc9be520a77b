"""Drafts behind the rows of a step, left in the future map for their next ones. Knows no weights.

Whatever a step accepted or sampled is read on the device; the host knows which rows it has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pippin.backends.base import DecodeRow, PrefillRow
from pippin.backends.torch.drafts.mtp_drafter import Entered, Entries, MtpDrafter
from pippin.backends.torch.plain.accept import noise_words
from pippin.backends.torch.step.parts import StepParts
from pippin.backends.torch.step.verify.batch import TakenRows, VerifyBatch

Row = DecodeRow | PrefillRow


def is_drafted(row: Row) -> bool:
    """Its next token is known when the step has run; what a grammar masks is sampled later."""
    return row.samples and not row.masked


class RowDrafts:
    def __init__(self, parts: StepParts, drafter: MtpDrafter) -> None:
        self._parts = parts
        self._drafter = drafter

    def start(self, slot: int) -> None:
        self._drafter.ring.start(slot)

    def behind_tokens(self, taken: TakenRows, batch: VerifyBatch, hidden: torch.Tensor) -> None:
        """Of rows that decode and have accepted and sampled; hidden [tokens, n]."""
        index, future = self._parts.pools.index, self._parts.future
        counts, sampled = future.counts[batch.slots].long(), future.tokens[batch.slots].long()
        place = torch.arange(batch.width, device=counts.device)
        known = torch.cat([batch.drafts.long(), sampled[:, None]], dim=1)
        following = torch.where(place < counts[:, None], known, sampled[:, None])
        samples = index(np.array([is_drafted(row) for row in taken.rows])) > 0
        is_kept = (place <= counts[:, None]) & samples[:, None]
        owners = torch.where(is_kept, batch.slots[:, None], 0)
        owners, following = owners.flatten()[batch.places], following.flatten()[batch.places]
        entered = self._drafter.feed(Entries(owners, batch.positions, following, hidden))
        firsts = np.cumsum(taken.depths + 1) - taken.depths - 1
        self._draft(
            taken.rows,
            entered,
            last=index(firsts) + counts,
            positions=batch.starts + counts,
            bound=int((taken.positions + taken.depths).max()),
        )

    def behind_chunks(self, rows: Sequence[PrefillRow], hidden: torch.Tensor) -> None:
        """Of chunks, one behind the other; hidden [tokens, n]. The head remembers their ends."""
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
        entries = Entries(index(owners), where, device_tokens, hidden[index(np.concatenate(at))])
        entered = self._drafter.feed(entries)
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
        entered = self._drafter.feed(Entries(device_slots, where, tokens, hidden))
        last = torch.arange(len(rows), device=where.device)
        self._draft(rows, entered, last, where, int(positions.max()))

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
