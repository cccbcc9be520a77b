"""A step in flight on torch: launches run in order, results leave on a stream of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from pippin.backends.base import DecodeRow, PrefillRow
from pippin.backends.step.pending import Pending, Sampling
from pippin.backends.torch.graphs.steps import Ran
from pippin.backends.torch.streams import Arrival, Streams


@dataclass(kw_only=True)
class TorchPending(Pending[torch.Tensor]):
    streams: Streams

    def bring(self, arrays: Sequence[torch.Tensor]) -> Arrival:
        return self.streams.bring(arrays)

    def sample(self, masks: np.ndarray) -> None:
        with torch.inference_mode(), self.streams.forward():
            super().sample(masks)

    def read_drawn(self, slots: Sequence[int], sampled: Sequence[int], drawn: torch.Tensor) -> None:
        """drawn, int32 [2, rows]: tokens, of which those of `sampled` count, and overflows."""
        counted = set(sampled)
        self.read_tokens([slot if slot in counted else 0 for slot in slots], drawn[0])
        self.read_overflows(slots, drawn[1])


@dataclass(frozen=True)
class Draws(Sampling[torch.Tensor]):
    def draw(
        self,
        step: TorchPending,
        rows: Sequence[DecodeRow | PrefillRow],
        logits: torch.Tensor,  # [rows, vocab]
    ) -> None:
        """The next tokens of those that sample; what is masked waits for its masks."""
        for masked in (False, True):
            wanted = [n for n, row in enumerate(rows) if row.samples and row.masked is masked]
            if not wanted:
                continue
            # What waits is a copy: a graph writes its logits again.
            is_whole = len(wanted) == len(logits) and not masked
            own = logits if is_whole else logits[self.arrays.index(np.array(wanted))]
            step.add_to_sample([self.slots.sample_row(rows[n]) for n in wanted], own, masked=masked)
        step.sample_added()

    def take_drawn(
        self,
        step: TorchPending,
        rows: Sequence[DecodeRow | PrefillRow],
        ran: Ran,  # of these rows, or more
    ) -> None:
        """What a graph left, which drew the tokens itself unless that was left to the sampler."""
        owners = [row.slot for row in rows]
        arrival = step.bring([ran.drawn[:, : len(owners)].clone()])
        if ran.logits is not None:
            step.read_later(arrival, partial(step.read_drawn, owners, []))
            self.draw(step, rows, ran.logits[: len(owners)])
            return
        sampled = [row.slot for row in rows if row.samples]
        self.future.note_written(np.array(sampled))
        step.read_later(arrival, partial(step.read_drawn, owners, sampled))
