"""A decode step out of kernels: few launches, no host, shapes that depend on its width alone.

A few rows take products of our own, with norms and sums inside; more rows take cuBLAS, with
kernels between. Equal to `PlainForward.tokens` but for rounding.
"""

from __future__ import annotations

from functools import partial

import torch

from pippin.backends.torch.kernels.attention.latent_step import latent_step
from pippin.backends.torch.kernels.attention.step import attention_step
from pippin.backends.torch.kernels.epilogues import ConvStep
from pippin.backends.torch.kernels.layers import (
    Projecting,
    first_of,
    most_fused,
    run_fused,
    run_layers,
)
from pippin.backends.torch.kernels.packed.linear import by_kernels
from pippin.backends.torch.kernels.packed.rows import look_up_packed
from pippin.backends.torch.kernels.products import product
from pippin.backends.torch.kernels.recurrent.delta_step import conv_step, delta_step
from pippin.backends.torch.kernels.recurrent.mamba_step import mamba_step
from pippin.backends.torch.kernels.rows import look_up, norm_rows
from pippin.backends.torch.models.attention_layer import AttentionLayer
from pippin.backends.torch.models.conv_layer import ConvLayer
from pippin.backends.torch.models.decoder import Decoder, DecoderLayer
from pippin.backends.torch.models.delta_layer import DeltaLayer
from pippin.backends.torch.models.latent_layer import LatentLayer
from pippin.backends.torch.models.mamba_layer import MambaLayer
from pippin.backends.torch.plain.recurrent import convolve_step
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.step.decode_inputs import Inputs


class DecodeKernels:
    def __init__(
        self,
        decoder: Decoder,
        pools: Pools,
        table: torch.Tensor,  # int32 [slots, positions]
    ) -> None:
        self._decoder = by_kernels(decoder)
        self._pools = pools
        self._table = table
        self._most_fused = most_fused(decoder)

    def logits(self, inputs: Inputs, future: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] of the tokens that `future`, int32 [slots], has of the rows."""
        x = self.embedded(inputs, future)
        if len(x) <= self._most_fused:
            return self._fused(x, inputs)
        return self._decoder.head(run_layers(self._decoder, x, partial(self.mix, inputs=inputs)))

    def embedded(self, inputs: Inputs, future: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] of these tokens. Their cells go into the table."""
        return self._decoder.scaled(self._look_up(inputs, future))

    def _look_up(self, inputs: Inputs, future: torch.Tensor) -> torch.Tensor:
        embed = self._decoder.embed
        if isinstance(embed, torch.Tensor):
            return look_up(embed, future, self._table, inputs)
        return look_up_packed(embed, future, self._table, inputs)

    def _fused(self, x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        def conv_of(layer: DecoderLayer) -> ConvStep | None:
            mixer = layer.mixer
            if not isinstance(mixer, DeltaLayer) or len(x) > 1:
                return None
            before = self._pools.conv[layer.number]
            return ConvStep(before, mixer.taps, inputs.state_in, inputs.state_out)

        mix = partial(self._mix_few, inputs=inputs)
        y = run_fused(self._decoder, x, mix, conv_of)
        if len(x) == 1:
            return product(y, self._decoder.head, norm=self._decoder.norm)
        return self._decoder.head(norm_rows(y, self._decoder.norm))

    def _mix_few(
        self, layer: DecoderLayer, projected: torch.Tensor, inputs: Inputs
    ) -> torch.Tensor:
        if len(projected) > 1 or isinstance(layer.mixer, AttentionLayer):
            return self.mix_projected(layer, projected, inputs)
        assert isinstance(layer.mixer, DeltaLayer)  # the convolution was part of the product
        return self._recur(layer.mixer, layer.number, projected, inputs)

    def mix(self, layer: DecoderLayer, normed: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        mixer = layer.mixer
        if isinstance(mixer, Projecting):
            return mixer.out(self.mix_projected(layer, first_of(mixer)(normed), inputs))
        if isinstance(mixer, LatentLayer):
            return self._attend_latents(mixer, layer.number, normed, inputs)
        assert isinstance(mixer, ConvLayer)
        conv = self._pools.conv[layer.number]
        return self._convolve(mixer, conv, mixer.project(normed), inputs)

    def mix_projected(
        self, layer: DecoderLayer, projected: torch.Tensor, inputs: Inputs
    ) -> torch.Tensor:
        """What the last product reads."""
        mixer = layer.mixer
        if isinstance(mixer, AttentionLayer):
            return self._attend(mixer, layer.number, projected, inputs)
        assert isinstance(mixer, DeltaLayer | MambaLayer)
        conv = self._pools.conv[layer.number]
        conv_step(projected, mixer, conv, inputs.state_in, inputs.state_out)
        return self._recur(mixer, layer.number, projected, inputs)

    def _attend_latents(
        self, mixer: LatentLayer, number: int, normed: torch.Tensor, inputs: Inputs
    ) -> torch.Tensor:
        q, cells = mixer.projected(normed, inputs.position.long())
        kept = self._pools.kv[number].flatten(1)
        kept[inputs.cell.long()] = cells
        absorbed = mixer.absorb(q).transpose(0, 1)
        latents = latent_step(absorbed, mixer, kept, self._table, inputs)
        return mixer.finish(mixer.values_of(latents.transpose(0, 1)))

    def _convolve(
        self, mixer: ConvLayer, conv: torch.Tensor, projected: torch.Tensor, inputs: Inputs
    ) -> torch.Tensor:
        """In plain operations, of which a graph may be made."""
        mixed, gate, _ = mixer.split(projected)
        source = torch.cat([conv[inputs.state_in.long()], mixed[:, None]], dim=1)
        conv[inputs.state_out.long()] = source[:, 1:]
        return mixer.finish(convolve_step(mixer, source), gate)

    def _attend(
        self, mixer: AttentionLayer, number: int, projected: torch.Tensor, inputs: Inputs
    ) -> torch.Tensor:
        projected = mixer.normed(projected)
        kv = self._pools.kv[number]
        return attention_step(projected, mixer, kv, self._table, inputs, early=True)

    def _recur(
        self,
        mixer: DeltaLayer | MambaLayer,
        number: int,
        projected: torch.Tensor,
        inputs: Inputs,
    ) -> torch.Tensor:
        state = self._pools.recurrent[number]
        if isinstance(mixer, MambaLayer):
            return mamba_step(projected, mixer, state, inputs.state_in, inputs.state_out)
        return delta_step(projected, mixer, state, inputs.state_in, inputs.state_out)
