"""A decoder over the pools, in plain torch operations. Knows no slots' owners and no sampling.

Every write to a pool is here, or in the kernels that stand in for it, and runs where the forward
runs: in the order of launches.
"""

from __future__ import annotations

from typing import Protocol

import torch

from pippin.backends.torch.layer_run import LayerRun
from pippin.backends.torch.models.decoder import Decoder
from pippin.backends.torch.models.delta_layer import DeltaLayer
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.recurrent.gated_delta import (
    Blocks,
    gated_delta_blocks,
    gated_delta_step,
)
from pippin.backends.torch.step.batches import ChunkBatch, DecodeBatch


class ChunkForward(Protocol):
    def chunks(self, batch: ChunkBatch) -> torch.Tensor:
        """Run chunks of prompts: [tokens, hidden], what the head reads."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class PlainForward:
    def __init__(self, decoder: Decoder, pools: Pools) -> None:
        self.decoder = decoder
        self.pools = pools

    def chunks(self, batch: ChunkBatch) -> torch.Tensor:
        """Run chunks of prompts: [tokens, hidden], what the head reads."""
        run = _ChunkRun(batch, self.pools)
        return self.decoder.norm(self.decoder.run(batch.tokens, run.mix))

    def tokens(self, batch: DecodeBatch) -> torch.Tensor:
        """Run one token of each row: [rows, hidden], what the head reads."""
        run = _TokenRun(batch, self.pools)
        return self.decoder.norm(self.decoder.run(batch.tokens, run.mix))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.decoder.head(hidden)


class _ChunkRun(LayerRun[ChunkBatch]):
    def __init__(self, batch: ChunkBatch, pools: Pools) -> None:
        super().__init__(batch, pools)
        if batch.conv is None:
            return
        self._blocks = Blocks(batch.lengths, pools.device)
        counts, firsts = self._blocks.counts, self._blocks.firsts
        ends = [first + count - 1 for first, count in zip(firsts, counts, strict=True)]
        # The blocks whose states are kept: each row's last one, and the tapped ones.
        taken = batch.taken
        self._kept = torch.tensor([*ends, *taken.tap_blocks(firsts)], device=pools.device)
        tapped = torch.tensor(
            [tap.slab for tap in taken.taps], dtype=torch.int64, device=pools.device
        )
        self._slabs = torch.cat([batch.states_out, tapped])

    def _recur(self, mixer: DeltaLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        batch, index = self._batch, self._batch.conv
        assert index is not None
        recurrent, conv = self._pools.recurrent[number], self._pools.conv[number]
        mixed, z, b, a = mixer.split(mixer.project(x))
        source = torch.cat([conv[batch.states_in].flatten(0, 1), mixed])
        convolved = mixed * mixer.taps[-1]
        for inputs, tap in zip(index.inputs, mixer.taps[:-1], strict=False):
            convolved += source[inputs] * tap
        y, after = gated_delta_blocks(
            mixer.inputs(convolved, b, a), self._blocks, recurrent[batch.states_in]
        )
        conv[self._slabs] = source[index.after]
        recurrent[self._slabs] = after[self._kept]
        return mixer.finish(y, z)


class _TokenRun(LayerRun[DecodeBatch]):
    def _recur(self, mixer: DeltaLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        batch = self._batch
        recurrent, conv = self._pools.recurrent[number], self._pools.conv[number]
        mixed, z, b, a = mixer.split(mixer.project(x))
        source = torch.cat([conv[batch.states_in], mixed[:, None]], dim=1)
        convolved = (source * mixer.taps).sum(dim=1)
        y, after = gated_delta_step(mixer.inputs(convolved, b, a), recurrent[batch.states_in])
        conv[batch.states_out] = source[:, 1:]
        recurrent[batch.states_out] = after
        return mixer.finish(y, z)
