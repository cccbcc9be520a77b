"""Chunks of prompts out of kernels, equal to `PlainForward.chunks` but for rounding.

Launched, in whatever shapes the chunks have, with torch's own attention over gathered cells. Or for
graphs, in shapes that depend on room alone: everything that depends on the chunks is looked up in
their inputs, on the device, and no row sees the tokens that are padding.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from pippin.backends.torch.kernels.attention_blocks import attend_blocks
from pippin.backends.torch.kernels.layers import run_layers
from pippin.backends.torch.kernels.packed.linear import by_kernels
from pippin.backends.torch.kernels.recurrent.delta_blocks import delta_blocks
from pippin.backends.torch.kernels.rows import conv_rows, gated_norm, keep_inputs
from pippin.backends.torch.models.attention_layer import Scoring
from pippin.backends.torch.models.decoder import Decoder, RecurrentLayer
from pippin.backends.torch.models.delta_layer import DeltaLayer
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

    def __init__(self, decoder: Decoder, pools: Pools) -> None:
        self._decoder = by_kernels(decoder)
        self._pools = pools

    def chunks(self, batch: ChunkBatch) -> torch.Tensor:
        run = _LaunchedRun(batch, self._pools)
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
        run = _CapturedRun(inputs, self._pools, self._table)
        x = self._decoder.embedded(inputs.token.long())
        return run_layers(self._decoder, x, run.mix)


class _LaunchedRun(ChunkRun):
    """Recurrent layers other than Gated DeltaNet are plain operations."""

    @cached_property
    def _inputs(self) -> RecurrentInputs:
        batch, index = self._batch, self._pools.index
        assert self._conv is not None
        lines = block_lines(self._taken)
        # In fours, so that every line begins where kernels load best.
        blocks = index(np.pad(lines, ((0, 0), (0, -lines.shape[1] % 4))))
        return RecurrentInputs(
            self._conv.inputs,
            batch.states_in,
            index(self._taken.first_blocks),
            index(self._taken.block_counts),
            BlockInputs(*blocks),
        )

    def _recur(self, mixer: RecurrentLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        if isinstance(mixer, DeltaLayer):
            return _recur(mixer, x, self._pools, number, self._inputs)
        return super()._recur(mixer, number, x)


class _CapturedRun(LayerRun[HeldCells]):
    """Windows are plain operations."""

    def __init__(self, inputs: ChunkInputs, pools: Pools, table: torch.Tensor) -> None:
        cells = HeldCells(inputs.cell.long(), seen=())  # the table says what is seen
        super().__init__(pools, inputs.position.long(), cells, windows=None)
        self._table = table
        self._inputs = inputs.recurrent

    def _look(
        self, q: torch.Tensor, kv: torch.Tensor, held: HeldCells, scoring: Scoring
    ) -> torch.Tensor:
        return attend_blocks(q, kv, self._table, self._inputs.blocks, scoring)

    def _recur(self, mixer: RecurrentLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(mixer, DeltaLayer)
        return _recur(mixer, x, self._pools, number, self._inputs)


def _recur(
    mixer: DeltaLayer, x: torch.Tensor, pools: Pools, number: int, inputs: RecurrentInputs
) -> torch.Tensor:
    recurrent, conv = pools.recurrent[number], pools.conv[number]
    projected = mixer.project(x)
    _, z, *_ = mixer.split(projected)
    gates = projected[:, -2 * mixer.shape.num_v_heads :]
    convolved = conv_rows(projected, conv, mixer.taps, inputs.places, inputs.states_in)
    y = delta_blocks(convolved, gates, mixer, recurrent, inputs)
    keep_inputs(projected, conv, inputs.blocks)
    return mixer.out(gated_norm(y, z, mixer.norm))
