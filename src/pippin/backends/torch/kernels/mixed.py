"""Decode rows beside chunks of prompts, in one forward: products are of all tokens, so that weights
are read once; what mixes tokens is the kernels of either. Of models without recurrent layers: with
some it was slower than two forwards.

Equal to a decode step and a forward of chunks but for rounding.
"""

from __future__ import annotations

import torch

from pippin.backends.torch.kernels.decode import DecodeKernels
from pippin.backends.torch.kernels.layers import run_layers
from pippin.backends.torch.kernels.packed.linear import by_kernels
from pippin.backends.torch.kernels.prompt import CapturedRun
from pippin.backends.torch.models.attention_layer import AttentionLayer
from pippin.backends.torch.models.decoder import Decoder, DecoderLayer
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.step.chunk_inputs import ChunkInputs
from pippin.backends.torch.step.decode_inputs import Inputs


class MixedKernels:
    """For graphs: a `MixedForward`."""

    def __init__(
        self,
        decoder: Decoder,
        pools: Pools,
        table: torch.Tensor,  # int32 [slots, positions]
        decode: DecodeKernels,
    ) -> None:
        self._decoder = by_kernels(decoder)
        self._pools = pools
        self._table = table
        self._decode = decode

    def hidden(self, rows: Inputs, chunks: ChunkInputs, future: torch.Tensor) -> torch.Tensor:
        """[rows + tokens, hidden]: what the head reads, of rows and behind them of chunks."""
        run = CapturedRun(chunks, self._pools, self._table)
        width = rows.slot.shape[0]

        def mix(layer: DecoderLayer, normed: torch.Tensor) -> torch.Tensor:
            mixer = layer.mixer
            if isinstance(mixer, AttentionLayer):
                projected = mixer.qkv(normed)
                of_rows = self._decode.mix_projected(layer, projected[:width], rows)
                of_chunks = run.attend_projected(mixer, layer.number, projected[width:])
                return mixer.out(torch.cat([of_rows, of_chunks]))
            of_rows = self._decode.mix(layer, normed[:width], rows)
            return torch.cat([of_rows, run.mix(layer, normed[width:])])

        of_rows = self._decode.embedded(rows, future)
        x = torch.cat([of_rows, self._decoder.embedded(chunks.token.long())])
        return run_layers(self._decoder, x, mix)
