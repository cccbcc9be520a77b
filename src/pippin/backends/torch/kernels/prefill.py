"""Chunks of prompts through the decoder, with kernels between cuBLAS's products. For GPUs.

Equal to `forward.PlainForward.chunks` but for rounding. Attention is torch's own, over the cells
that a row has, gathered.
"""

from __future__ import annotations

import numpy as np
import torch

from pippin.backends.torch.kernels.delta_blocks import BlockTable, delta_blocks
from pippin.backends.torch.kernels.experts.feed_forward import feed_forward
from pippin.backends.torch.kernels.rows import (
    add_norm,
    conv_rows,
    gated_norm,
    norm_rows,
)
from pippin.backends.torch.layer_run import LayerRun
from pippin.backends.torch.models.decoder import Decoder, Mix
from pippin.backends.torch.models.delta_layer import DeltaLayer
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.step.batches import ChunkBatch
from pippin.types import GRID


class ChunkKernels:
    def __init__(self, decoder: Decoder, pools: Pools) -> None:
        self._decoder = decoder
        self._pools = pools

    def chunks(self, batch: ChunkBatch) -> torch.Tensor:
        """Run chunks of prompts: [tokens, hidden], what the head reads."""
        return run_chunks(self._decoder, self._pools, batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decoder.head(hidden)


def run_chunks(decoder: Decoder, pools: Pools, batch: ChunkBatch) -> torch.Tensor:
    return run_layers(decoder, batch.tokens, _ChunkRun(batch, pools).mix)


def run_layers(decoder: Decoder, tokens: torch.Tensor, mix: Mix) -> torch.Tensor:
    """As `Decoder.run` and the last norm: [tokens, hidden], what the head reads."""
    layers = decoder.layers
    x = decoder.embed[tokens]
    normed = norm_rows(x, layers[0].input_norm)
    for index, layer in enumerate(layers):
        x, normed = add_norm(x, mix(layer, normed), layer.mlp_norm)
        last = index + 1 == len(layers)
        following = decoder.norm if last else layers[index + 1].input_norm
        x, normed = add_norm(x, feed_forward(layer.mlp, normed), following)
    return normed


class _ChunkRun(LayerRun[ChunkBatch]):
    def __init__(self, batch: ChunkBatch, pools: Pools) -> None:
        super().__init__(batch, pools)
        if batch.conv is None:
            return
        self._slabs = torch.cat([batch.states_out, pools.index(_tapped(batch))])
        self._table = block_table(batch, pools)
        # The inputs that a convolution keeps: of the chunk, or where that is shorter, from before.
        num_before = len(batch.taken.rows) * pools.layout.conv_shape[0]
        after = batch.conv.after
        self._is_from_before = (after < num_before)[..., None]
        self._from_before = after.clamp_max(num_before - 1)
        self._from_chunk = (after - num_before).clamp_min(0)

    def _recur(self, mixer: DeltaLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        batch, index = self._batch, self._batch.conv
        assert index is not None
        recurrent, conv = self._pools.recurrent[number], self._pools.conv[number]
        projected = mixer.project(x)
        mixed, z, *_ = mixer.split(projected)
        gates = projected[:, -2 * mixer.shape.num_v_heads :]
        before = conv[batch.states_in].flatten(0, 1)
        convolved = conv_rows(projected, conv, mixer.taps, index.inputs, batch.states_in)
        y = delta_blocks(convolved, gates, mixer, recurrent, batch.states_in, self._table)
        conv[self._slabs] = torch.where(
            self._is_from_before, before[self._from_before], mixed[self._from_chunk]
        )
        return mixer.out(gated_norm(y, z, mixer.norm))


def _tapped(batch: ChunkBatch) -> np.ndarray:
    return np.array([tap.slab for tap in batch.taken.taps], dtype=np.int64)


def block_table(batch: ChunkBatch, pools: Pools) -> BlockTable:
    lengths = np.array(batch.lengths)
    counts = -(-lengths // GRID)
    firsts = np.cumsum([0, *counts])[:-1]
    rows = np.repeat(np.arange(len(lengths)), counts)
    behind = (np.arange(len(rows)) - firsts[rows]) * GRID  # tokens of the row before a block
    starts = np.cumsum([0, *lengths])[:-1][rows] + behind
    tapped = np.zeros(len(rows), dtype=np.int64)
    tapped[batch.taken.tap_blocks(firsts.tolist())] = _tapped(batch)
    slabs = pools.index(tapped)
    slabs[pools.index(firsts + counts - 1)] = batch.states_out
    return BlockTable(
        starts=pools.index(starts),
        lengths=pools.index(np.minimum(lengths[rows] - behind, GRID)),
        slabs=slabs,
        firsts=pools.index(firsts),
        counts=pools.index(counts),
    )
