"""A checkpoint to a decoder on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pippin.backends.torch.checkpoint import open_weights
from pippin.backends.torch.config import read_config, read_shape
from pippin.backends.torch.device import dtype_of, find_device
from pippin.backends.torch.models.build import build_decoder
from pippin.backends.torch.models.decoder import Decoder


@dataclass(frozen=True)
class LoadedModel:
    decoder: Decoder
    name: str
    max_len: int


def load(
    path: Path,
    *,
    dtype: str = "auto",
    max_len: int | None = None,
    device: torch.device | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> LoadedModel:
    progress("reading the checkpoint")
    shape = read_shape(read_config(path))
    device = device or find_device()
    longest = min(shape.max_len, max_len or shape.max_len)
    progress("loading weights")
    with open_weights(path, device) as weights:
        stored = weights.stored_dtype(f"{shape.prefix}embed_tokens.weight")
        weights.dtype = dtype_of(dtype, device, stored)
        decoder = build_decoder(shape, weights, weights.dtype, device, longest)
    return LoadedModel(decoder, path.name, longest)
