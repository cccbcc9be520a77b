"""A decoder over the pools, in plain torch operations. Knows no requests and no sampling.

Every write to a pool is here, or in the kernels that stand in for it, and runs where the forward
runs: in the order of launches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from pippin.backends.torch.models.attention_layer import AttentionLayer, Scoring
from pippin.backends.torch.models.decoder import Decoder, DecoderLayer, RecurrentLayer
from pippin.backends.torch.models.latent_layer import LatentLayer
from pippin.backends.torch.plain.attention import attend_rows
from pippin.backends.torch.plain.blocks import Blocks
from pippin.backends.torch.plain.latent import attend_latent
from pippin.backends.torch.plain.recurrent import convolve_step, recur_blocks, recur_step
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.step.batches import Batch, ChunkBatch, HeldCells
from pippin.backends.torch.step.verify.batch import VerifiedCells

Held = TypeVar("Held", HeldCells, VerifiedCells)


class ChunkForward(Protocol):
    def chunks(self, batch: ChunkBatch) -> torch.Tensor:
        """Run chunks of prompts: [tokens, hidden], what the head reads."""
        ...


class PlainForward:
    def __init__(self, decoder: Decoder, pools: Pools) -> None:
        self.decoder = decoder
        self.pools = pools

    def chunks(self, batch: ChunkBatch) -> torch.Tensor:
        run = ChunkRun(batch, self.pools)
        return self.decoder.norm(self.decoder.run(batch.tokens, run.mix))

    def tokens(self, batch: Batch) -> torch.Tensor:
        """Run one token of each row: [rows, hidden], what the head reads."""
        run = _TokenRun(batch, self.pools)
        return self.decoder.norm(self.decoder.run(batch.tokens, run.mix))


class LayerRun(ABC, Generic[Held]):
    """Mixes the tokens of one forward, layer by layer."""

    def __init__(
        self, pools: Pools, positions: torch.Tensor, held: Held, windows: Held | None
    ) -> None:
        self._pools = pools
        self._positions = positions
        self._held: Held = held
        self._windows: Held | None = windows

    def mix(self, layer: DecoderLayer, x: torch.Tensor) -> torch.Tensor:
        mixer = layer.mixer
        assert mixer is not None
        if isinstance(mixer, AttentionLayer):
            return self._attend(mixer, layer.number, x)
        if isinstance(mixer, LatentLayer):
            q, cells = mixer.projected(x, self._positions)
            kept = self._pools.kv[layer.number].flatten(1)
            kept[self._held.cells] = cells
            return mixer.finish(self._look_at_latents(mixer, q, kept))
        return self._recur(mixer, layer.number, x)

    def _attend(self, mixer: AttentionLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        kv, held = self._pools.kv, self._held
        if mixer.shape.window and not mixer.shape.keeps_all:
            assert self._windows is not None
            kv, held = self._pools.window_kv, self._windows
        q, gate = self._place(mixer, x, kv[number], held.cells)
        return mixer.finish(self._look(q, kv[number], held, mixer.scoring), gate)

    def _place(
        self, mixer: AttentionLayer, x: torch.Tensor, kv: torch.Tensor, cells: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries and gates; keys and values go into their cells."""
        q, k, v, gate = mixer.project(x, self._positions)
        kv[cells] = torch.stack([k, v], dim=1)
        return q, gate

    @abstractmethod
    def _look(
        self, q: torch.Tensor, kv: torch.Tensor, held: Held, scoring: Scoring
    ) -> torch.Tensor:
        """Attention of each row over the cells that it sees."""
        ...

    @abstractmethod
    def _look_at_latents(
        self, mixer: LatentLayer, q: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor:
        """The same, of latent attention: kept [cells, channels]."""
        ...

    @abstractmethod
    def _recur(self, mixer: RecurrentLayer, number: int, x: torch.Tensor) -> torch.Tensor: ...


class BatchRun(LayerRun[HeldCells]):
    def __init__(self, batch: Batch, pools: Pools) -> None:
        super().__init__(pools, batch.positions, batch.held, batch.windows)
        self._batch = batch

    def _look(
        self, q: torch.Tensor, kv: torch.Tensor, held: HeldCells, scoring: Scoring
    ) -> torch.Tensor:
        return attend_rows(q, kv, self._batch.lengths, held.seen, scoring)

    def _look_at_latents(
        self, mixer: LatentLayer, q: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor:
        rows = zip(q.split(self._batch.lengths), self._held.seen, strict=True)
        return torch.cat([attend_latent(mixer, part, kept[own]) for part, own in rows])


class ChunkRun(BatchRun):
    def __init__(self, batch: ChunkBatch, pools: Pools) -> None:
        super().__init__(batch, pools)
        self._conv = batch.conv
        self._taken = batch.taken

    @cached_property
    def _blocks(self) -> Blocks:
        return Blocks(self._batch.lengths, self._pools.device)

    @cached_property
    def _kept(self) -> torch.Tensor:
        """The blocks whose states are kept: each row's last one, and the tapped ones."""
        ends = self._taken.first_blocks + self._taken.block_counts - 1
        return self._pools.index(np.array([*ends.tolist(), *self._taken.tap_blocks]))

    @cached_property
    def _slabs(self) -> torch.Tensor:
        """Where they go."""
        tapped = np.array([tap.slab for tap in self._taken.taps], dtype=np.int64)
        return torch.cat([self._batch.states_out, self._pools.index(tapped)])

    def _recur(self, mixer: RecurrentLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        batch, index = self._batch, self._conv
        assert index is not None
        recurrent, conv = self._pools.recurrent[number], self._pools.conv[number]
        mixed, z, gates = mixer.split(mixer.project(x))
        source = torch.cat([conv[batch.states_in].flatten(0, 1), mixed])
        convolved = mixed * mixer.taps[-1]
        if mixer.conv_bias is not None:
            convolved += mixer.conv_bias
        for inputs, tap in zip(index.inputs, mixer.taps[:-1], strict=False):
            convolved += source[inputs] * tap
        y, after = recur_blocks(mixer, convolved, gates, self._blocks, recurrent[batch.states_in])
        conv[self._slabs] = source[index.after]
        recurrent[self._slabs] = after[self._kept]
        return mixer.finish(y, z)


class _TokenRun(BatchRun):
    def _recur(self, mixer: RecurrentLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        batch = self._batch
        recurrent, conv = self._pools.recurrent[number], self._pools.conv[number]
        mixed, z, gates = mixer.split(mixer.project(x))
        source = torch.cat([conv[batch.states_in], mixed[:, None]], dim=1)
        convolved = convolve_step(mixer, source)
        y, after = recur_step(mixer, convolved, gates, recurrent[batch.states_in])
        conv[batch.states_out] = source[:, 1:]
        recurrent[batch.states_out] = after
        return mixer.finish(y, z)
