"""Rows of logits to tokens in the future map, and on their way to the host. Computes no logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from pippin.backends.base import DecodeRow, PrefillRow
from pippin.backends.sampling.sampler import SampleRow
from pippin.backends.torch.graphs.steps import Ran
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.step.future_map import FutureMap
from pippin.backends.torch.step.pending import TorchPending
from pippin.backends.torch.step.slots import Slots
from pippin.backends.torch.streams import Streams


class Draws:
    def __init__(self, slots: Slots, future: FutureMap, pools: Pools, streams: Streams) -> None:
        self._slots = slots
        self._future = future
        self._pools = pools
        self._streams = streams

    def check(self, step: TorchPending, slots: Sequence[int], logits: torch.Tensor) -> None:
        """Note rows of logits [rows, vocab] that are not numbers: then none of a row's is one."""
        arrival = self._streams.bring([logits[:, 0].isnan()])
        step.read_later(arrival, partial(step.read_overflows, slots))

    def sample(
        self,
        step: TorchPending,
        rows: Sequence[DecodeRow | PrefillRow],
        logits: torch.Tensor,  # [rows, vocab]
    ) -> None:
        """The next tokens of those that sample; what is masked waits for its masks."""
        samples = [
            (number, self._slots.sample_row(row), row.masked)
            for number, row in enumerate(rows)
            if row.samples
        ]
        step.masked += [(row, logits[number].clone()) for number, row, masked in samples if masked]
        plain = [(number, row) for number, row, masked in samples if not masked]
        if not plain:
            return
        if len(plain) < len(logits):
            logits = logits[self._pools.index(np.array([number for number, _ in plain]))]
        self._sample_rows(step, [row for _, row in plain], logits, None)

    def take_drawn(
        self,
        step: TorchPending,
        rows: Sequence[DecodeRow | PrefillRow],
        ran: Ran,  # of these rows, or more
    ) -> None:
        """What a graph left, which drew the tokens itself unless that was left to the sampler."""
        owners = [row.slot for row in rows]
        arrival = self._streams.bring([ran.drawn[:, : len(owners)].clone()])
        if ran.logits is not None:
            step.read_later(arrival, partial(step.read_drawn, owners, []))
            self.sample(step, rows, ran.logits[: len(owners)])
            return
        sampled = [row.slot for row in rows if row.samples]
        self._future.note_written(np.array(sampled))
        step.read_later(arrival, partial(step.read_drawn, owners, sampled))

    def sample_masked(self, step: TorchPending, masks: np.ndarray) -> None:
        logits = torch.stack([logits for _, logits in step.masked])
        self._sample_rows(step, [row for row, _ in step.masked], logits, masks)

    def _sample_rows(
        self,
        step: TorchPending,
        rows: Sequence[SampleRow],
        logits: torch.Tensor,
        masks: np.ndarray | None,
    ) -> None:
        sampled = self._slots.sampler.sample(logits, rows, masks)
        slots = [row.slot for row in rows]
        self._future.stash(self._pools.index(np.array(slots)), sampled.tokens)
        self._future.note_written(np.array(slots))
        arrival = self._streams.bring([sampled.tokens])
        step.read_later(arrival, partial(step.read_tokens, slots))
        if sampled.logprobs is not None:
            asked = [slots[row] for row in sampled.asked]
            arrival = self._streams.bring(sampled.logprobs)
            step.read_later(arrival, partial(step.read_logprobs, asked))
