"""The decoder that all families share. Knows no pools: a caller mixes the tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pippin.backends.torch.models.mixers import (
    AttentionLayer,
    ConvLayer,
    DeltaLayer,
    LatentLayer,
    MambaLayer,
    MtpHead,
)
from pippin.backends.torch.models.packed import Weight, embed_rows
from pippin.backends.torch.models.parts import Head, Mlp, Norm
from pippin.backends.torch.shapes import ModelShape

RecurrentLayer = DeltaLayer | ConvLayer | MambaLayer
Mixer = AttentionLayer | LatentLayer | RecurrentLayer


@dataclass(frozen=True)
class DecoderLayer:
    number: int  # among the layers of its kind
    input_norm: Norm | None
    mixer: Mixer | None
    mlp_norm: Norm | None
    mlp: Mlp | None
    mixed_norm: Norm | None = None  # of what is mixed, before it is added
    fed_norm: Norm | None = None  # of what the feed-forward part returns
    scale: float = 1.0  # of both
    parallel: bool = False  # the feed-forward part reads what the mixer reads


Mix = Callable[[DecoderLayer, torch.Tensor], torch.Tensor]  # a layer and its normed input


@dataclass(frozen=True)
class Decoder:
    shape: ModelShape
    dtype: torch.dtype
    embed: Weight  # [vocab, hidden]
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: Head
    nbytes: int  # of all weights
    embed_scale: float = 1.0
    mtp: MtpHead | None = None  # where one was asked for

    @property
    def device(self) -> torch.device:
        return self.embed.device

    def run(self, tokens: torch.Tensor, mix: Mix) -> torch.Tensor:
        """What the layers make of tokens [n]: [n, hidden], before the last norm."""
        x = self.embedded(tokens)
        for layer in self.layers:
            normed = _normed(x, layer.input_norm)
            if layer.mixer is not None:
                x = x + _normed(mix(layer, normed), layer.mixed_norm) * layer.scale
            if layer.mlp is not None:
                if not layer.parallel:
                    normed = _normed(x, layer.mlp_norm)
                x = x + _normed(layer.mlp(normed), layer.fed_norm) * layer.scale
        return x

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n, hidden]"""
        return self.scaled(embed_rows(self.embed, tokens))

    def scaled(self, embeddings: torch.Tensor) -> torch.Tensor:
        return embeddings if self.embed_scale == 1.0 else embeddings * self.embed_scale


def _normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    return x if norm is None else norm(x)
