"""Chunks of prompts out of kernels, in shapes that depend on room alone: what graphs capture.

Equal to `forward.PlainForward.chunks` but for rounding. Everything that depends on the chunks is
looked up in their inputs, on the device; tokens that are padding run along and are seen by nobody.
"""

from __future__ import annotations

import torch

from pippin.backends.torch.kernels.attention_blocks import attend_blocks
from pippin.backends.torch.kernels.delta_blocks import BlockTable, delta_blocks
from pippin.backends.torch.kernels.kept_inputs import keep_inputs
from pippin.backends.torch.kernels.prefill import run_layers
from pippin.backends.torch.kernels.rows import conv_rows, gated_norm
from pippin.backends.torch.models.attention_layer import AttentionLayer
from pippin.backends.torch.models.decoder import Decoder, DecoderLayer
from pippin.backends.torch.models.delta_layer import DeltaLayer
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.step.chunk_inputs import ChunkInputs


class PromptKernels:
    def __init__(
        self,
        decoder: Decoder,
        pools: Pools,
        table: torch.Tensor,  # int32 [slots, positions]
    ) -> None:
        self._decoder = decoder
        self._pools = pools
        self._table = table

    def hidden(self, inputs: ChunkInputs) -> torch.Tensor:
        """[rows, hidden]: what the head reads at the ends of rows."""
        run = _PromptRun(inputs, self._pools, self._table)
        return run_layers(self._decoder, inputs.token.long(), run.mix)[inputs.last.long()]


class _PromptRun:
    def __init__(self, inputs: ChunkInputs, pools: Pools, table: torch.Tensor) -> None:
        self._places = inputs.places
        self._positions = inputs.position.long()
        self._cells = inputs.cell.long()
        self._blocks = inputs.blocks
        self._states_in = inputs.samples.state_in
        self._block_table = BlockTable(
            starts=self._blocks.start,
            lengths=self._blocks.length,
            slabs=self._blocks.slab,
            firsts=inputs.first_block,
            counts=inputs.num_blocks,
        )
        self._pools = pools
        self._table = table

    def mix(self, layer: DecoderLayer, x: torch.Tensor) -> torch.Tensor:
        mixer = layer.mixer
        if isinstance(mixer, AttentionLayer):
            return self._attend(mixer, layer.number, x)
        return self._recur(mixer, layer.number, x)

    def _attend(self, mixer: AttentionLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        assert not mixer.window, "windows are plain operations"
        kv = self._pools.kv[number]
        q, k, v, gate = mixer.project(x, self._positions)
        kv[self._cells] = torch.stack([k, v], dim=1)
        return mixer.finish(attend_blocks(q, kv, self._table, self._blocks), gate)

    def _recur(self, mixer: DeltaLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        recurrent, conv = self._pools.recurrent[number], self._pools.conv[number]
        projected = mixer.project(x)
        _, z, *_ = mixer.split(projected)
        gates = projected[:, -2 * mixer.shape.num_v_heads :]
        convolved = conv_rows(projected, conv, mixer.taps, self._places, self._states_in)
        y = delta_blocks(convolved, gates, mixer, recurrent, self._states_in, self._block_table)
        keep_inputs(projected, conv, self._blocks)
        return mixer.out(gated_norm(y, z, mixer.norm))
