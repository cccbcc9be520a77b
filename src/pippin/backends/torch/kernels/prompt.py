"""Chunks of prompts out of kernels, equal to `PlainForward.chunks` but for rounding.

Launched, in whatever shapes the chunks have, with torch's own attention over gathered cells. Or for
graphs, in shapes that depend on room alone: everything that depends on the chunks is looked up in
their inputs, on the device, and no row sees the tokens that are padding.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from pippin.backends.torch.kernels.attention.blocks import attend_blocks
from pippin.backends.torch.kernels.attention.heads import place_heads
from pippin.backends.torch.kernels.layers import run_layers
from pippin.backends.torch.kernels.packed.linear import by_kernels
from pippin.backends.torch.kernels.recurrent.convolution import conv_rows, keep_inputs
from pippin.backends.torch.kernels.recurrent.delta_blocks import delta_blocks
from pippin.backends.torch.kernels.recurrent.mamba_blocks import mamba_blocks
from pippin.backends.torch.kernels.rows import gated_norm
from pippin.backends.torch.models.attention_layer import AttentionLayer, Scoring
from pippin.backends.torch.models.conv_layer import ConvLayer
from pippin.backends.torch.models.decoder import Decoder, RecurrentLayer
from pippin.backends.torch.models.delta_layer import DeltaLayer
from pippin.backends.torch.models.latent_layer import LatentLayer
from pippin.backends.torch.plain.forward import ChunkRun, LayerRun
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.step.batches import ChunkBatch, HeldCells
from pippin.backends.torch.step.chunk_inputs import (
    BlockInputs,
    ChunkInputs,
    RecurrentInputs,
    block_lines,
)


class ChunkKernels:
    """Launched: a `ChunkForward`."""

    def __init__(
        self,
        decoder: Decoder,
        pools: Pools,
        table: torch.Tensor,  # int32 [slots, positions]
    ) -> None:
        self._decoder = by_kernels(decoder)
        self._pools = pools
        self._table = table

    def chunks(self, batch: ChunkBatch) -> torch.Tensor:
        run = _LaunchedRun(batch, self._pools, self._table)
        return run_layers(self._decoder, self._decoder.embedded(batch.tokens), run.mix)


class PromptKernels:
    """For graphs: a `PromptForward`."""

    def __init__(
        self,
        decoder: Decoder,
        pools: Pools,
        table: torch.Tensor,  # int32 [slots, positions]
    ) -> None:
        self._decoder = by_kernels(decoder)
        self._pools = pools
        self._table = table

    def hidden(self, inputs: ChunkInputs) -> torch.Tensor:
        run = CapturedRun(inputs, self._pools, self._table)
        x = self._decoder.embedded(inputs.token.long())
        return run_layers(self._decoder, x, run.mix)


class _KernelRun(LayerRun[HeldCells]):
    """Heads are placed by one kernel."""

    def _place(
        self, mixer: AttentionLayer, x: torch.Tensor, kv: torch.Tensor, cells: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._place_projected(mixer, mixer.qkv(x), kv, cells)

    def _place_projected(
        self, mixer: AttentionLayer, projected: torch.Tensor, kv: torch.Tensor, cells: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        qkv = mixer.normed(projected)
        return place_heads(qkv, mixer, kv, self._positions, cells), mixer.gate_of(qkv)


class _LaunchedRun(_KernelRun, ChunkRun):
    """Plain attention is torch's own."""

    def __init__(self, batch: ChunkBatch, pools: Pools, table: torch.Tensor) -> None:
        super().__init__(batch, pools)
        self._table = table

    @cached_property
    def _lines(self) -> BlockInputs:
        lines = block_lines(self._taken)
        # In fours, so that every line begins where kernels load best.
        return BlockInputs(*self._pools.index(np.pad(lines, ((0, 0), (0, -lines.shape[1] % 4)))))

    @cached_property
    def _inputs(self) -> RecurrentInputs:
        index = self._pools.index
        assert self._conv is not None
        return RecurrentInputs(
            self._conv.inputs,
            self._batch.states_in,
            index(self._taken.first_blocks),
            index(self._taken.block_counts),
            self._lines,
        )

    def _look_at_latents(
        self, mixer: LatentLayer, q: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor:
        if kept.dtype == torch.float32:  # products without tensor cores: torch's own are faster
            return super()._look_at_latents(mixer, q, kept)
        return _attend_latents(mixer, q, kept, self._table, self._lines)

    def _recur(self, mixer: RecurrentLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        return _recur(mixer, x, self._pools, number, self._inputs)


class CapturedRun(_KernelRun):
    """Windows are plain operations."""

    def __init__(self, inputs: ChunkInputs, pools: Pools, table: torch.Tensor) -> None:
        cells = HeldCells(inputs.cell.long(), seen=())  # the table says what is seen
        super().__init__(pools, inputs.position.long(), cells, windows=None)
        self._table = table
        self._inputs = inputs.recurrent

    def attend_projected(
        self, mixer: AttentionLayer, number: int, projected: torch.Tensor
    ) -> torch.Tensor:
        """What the last product reads."""
        kv, held = self._pools.kv[number], self._held
        q, gate = self._place_projected(mixer, projected, kv, held.cells)
        return mixer.gated(self._look(q, kv, held, mixer.scoring), gate)

    def _look(
        self, q: torch.Tensor, kv: torch.Tensor, held: HeldCells, scoring: Scoring
    ) -> torch.Tensor:
        return attend_blocks(q, kv, self._table, self._inputs.blocks, scoring)

    def _look_at_latents(
        self, mixer: LatentLayer, q: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor:
        return _attend_latents(mixer, q, kept, self._table, self._inputs.blocks)

    def _recur(self, mixer: RecurrentLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        return _recur(mixer, x, self._pools, number, self._inputs)


def _attend_latents(
    mixer: LatentLayer,
    q: torch.Tensor,
    kept: torch.Tensor,
    table: torch.Tensor,
    blocks: BlockInputs,
) -> torch.Tensor:
    shape = mixer.shape
    absorbed = mixer.absorb(q).transpose(0, 1)
    found = attend_blocks(absorbed, kept, table, blocks, Scoring(shape.scale), rank=shape.rank)
    return mixer.values_of(found.transpose(0, 1))


def _recur(
    mixer: RecurrentLayer, x: torch.Tensor, pools: Pools, number: int, inputs: RecurrentInputs
) -> torch.Tensor:
    recurrent, conv = pools.recurrent[number], pools.conv[number]
    mixed, z, gates = mixer.split(mixer.project(x))
    convolved = conv_rows(mixed, conv, mixer, inputs.places, inputs.states_in)
    keep_inputs(mixed, conv, inputs.blocks)
    if isinstance(mixer, ConvLayer):
        return mixer.finish(convolved, z)
    if isinstance(mixer, DeltaLayer):
        y = delta_blocks(convolved, gates, mixer, recurrent, inputs)
        return mixer.out(gated_norm(y, z, mixer.norm))
    y = mamba_blocks(convolved, gates, mixer, recurrent, inputs).flatten(1)
    groups = y.unflatten(1, (mixer.shape.num_groups, -1))
    return mixer.out(gated_norm(groups, z, mixer.norm, gate_first=True))
