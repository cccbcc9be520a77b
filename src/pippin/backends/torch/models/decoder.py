"""The decoder that all families share. Knows no pools: a caller mixes the tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pippin.backends.torch.config import ModelShape
from pippin.backends.torch.models.attention_layer import AttentionLayer
from pippin.backends.torch.models.delta_layer import DeltaLayer
from pippin.backends.torch.models.mtp_head import MtpHead
from pippin.backends.torch.models.parts import Linear, Mlp, Norm

Mixer = AttentionLayer | DeltaLayer


@dataclass(frozen=True)
class DecoderLayer:
    number: int  # among the layers of its kind
    input_norm: Norm
    mixer: Mixer
    mlp_norm: Norm
    mlp: Mlp


Mix = Callable[[DecoderLayer, torch.Tensor], torch.Tensor]  # a layer and its normed input


@dataclass(frozen=True)
class Decoder:
    shape: ModelShape
    dtype: torch.dtype
    embed: torch.Tensor  # [vocab, hidden]
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Linear
    nbytes: int  # of all weights
    mtp: MtpHead | None = None  # where one was asked for

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def run(self, tokens: torch.Tensor, mix: Mix) -> torch.Tensor:
        """What the layers make of tokens [n]: [n, hidden], before the last norm."""
        x = self.embed[tokens]
        for layer in self.layers:
            x = x + mix(layer, layer.input_norm(x))
            x = x + layer.mlp(layer.mlp_norm(x))
        return x
