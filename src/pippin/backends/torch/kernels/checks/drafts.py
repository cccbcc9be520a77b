"""Rows of noise that verify drafts, behind drafts that were kept of their last step.

Imports no kernels, and judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch

from pippin.backends.base import DecodeRow, Proposal
from pippin.backends.step.slots import FutureMap
from pippin.backends.torch.device import arrays_on
from pippin.backends.torch.graphs.steps import VerifyForward
from pippin.backends.torch.kernels.checks.layers import NoisyRows, lengths_of
from pippin.backends.torch.models.decoder import Decoder
from pippin.backends.torch.pools.kept_inputs import KeptInputs
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.step.slots import Slots
from pippin.backends.torch.step.verify.batch import VerifyBatch, take_rows, verify_batch
from pippin.backends.torch.step.verify.words import VerifySize, pack_verify, span_for

MakeVerify = Callable[
    [Decoder, Pools, KeptInputs, torch.Tensor, FutureMap[torch.Tensor]], VerifyForward
]

MAX_DEPTH = 2
DEPTHS = (2, 0, 1)  # of the rows,
NUM_KEPT = (2, 1, 0)  # drafts of their last step,
COUNTS = (1, 1, 0)  # and how many of these were accepted


@dataclass(frozen=True)
class NoisyDrafts:
    held: NoisyRows
    kept: KeptInputs
    future: FutureMap[torch.Tensor]
    size: VerifySize
    words: torch.Tensor  # int32 [fields, rows]
    batch: VerifyBatch

    @property
    def pools(self) -> Pools:
        return self.held.pools

    def found(self, run: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        """What a run returns and leaves, and everything as before it."""
        state = [self.pools.memory, self.kept.inputs]
        before = [tensor.clone() for tensor in state]
        written = [run(), *self.held.written(self.batch.held.cells, self.batch.states_out)]
        for row, depth in enumerate(self.batch.lengths):
            kept = self.kept.inputs[:, self.batch.slots[row], : depth - 1]
            written += [kept.clone()] if kept.numel() else []
        for tensor, content in zip(state, before, strict=True):
            tensor.copy_(content)
        return written


def noisy_drafts(decoder: Decoder, num_rows: int) -> NoisyDrafts:
    held = NoisyRows(decoder, lengths_of(num_rows))
    pools, rows, slots = held.pools, held.rows, held.slots
    kept = KeptInputs(pools.layout, num_rows, MAX_DEPTH, decoder.device)
    kept.inputs.normal_(generator=torch.Generator(decoder.device).manual_seed(1))
    future = FutureMap(arrays_on(decoder.device), num_rows, max_depth=MAX_DEPTH)
    where = pools.index(slots)
    future.stash(where, where % decoder.shape.vocab_size)
    rows.num_kept[slots] = np.resize(NUM_KEPT, num_rows)
    future.stash_lengths(
        where, pools.index(rows.lengths[slots]), pools.index(np.resize(COUNTS, num_rows))
    )
    decodes = []
    for slot, depth in zip(slots.tolist(), cycle(DEPTHS), strict=False):
        position = int(rows.lengths[slot])
        drafts = Proposal(position + 1, np.arange(2, 2 + depth, dtype=np.int32))
        decodes.append(DecodeRow(slot, position, depth=depth, proposal=drafts if depth else None))
    taken = take_rows(decodes, rows, pools)
    size = VerifySize(num_rows, taken.width - 1, span_for(MAX_DEPTH))
    sampling = Slots(num_rows, decoder.shape.vocab_size, torch.from_numpy)
    words = pack_verify(size, taken, rows, sampling, pools.layout.waste_cell)
    batch = verify_batch(taken, rows, future, pools)
    return NoisyDrafts(held, kept, future, size, torch.from_numpy(words).to(decoder.device), batch)
