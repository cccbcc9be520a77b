"""A checkpoint to a decoder on a device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pippin.amounts import show_bytes
from pippin.backends.mtp_weights import find_mtp_weights
from pippin.backends.torch.checkpoint import open_weights
from pippin.backends.torch.config import read_config, read_shape
from pippin.backends.torch.device import dtype_of, find_device
from pippin.backends.torch.models.build import build_decoder
from pippin.backends.torch.models.decoder import Decoder
from pippin.errors import LoadError

logger = logging.getLogger(__name__)


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
    mtp: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> LoadedModel:
    """`mtp`: with its MTP head, if it has one; what is missing is logged."""
    try:
        return _load(path, dtype, max_len, device, mtp, progress)
    except torch.OutOfMemoryError as error:
        nbytes = sum(file.stat().st_size for file in path.glob("model*.safetensors"))
        raise LoadError(
            f"memory: the weights ({show_bytes(nbytes)} on disk) do not fit the GPU's free memory: "
            "stop other programs that use the GPU, or use a smaller or quantized model "
            f"({error})"
        ) from error


def _load(
    path: Path,
    dtype: str,
    max_len: int | None,
    device: torch.device | None,
    mtp: bool,
    progress: Callable[[str], None],
) -> LoadedModel:
    progress("reading the checkpoint")
    shape = read_shape(read_config(path))
    device = device or find_device()
    longest = min(shape.max_len, max_len or shape.max_len)
    progress("loading weights")
    with open_weights(path, device) as weights:
        stored = weights.stored_dtype(f"{shape.prefix}embed_tokens.weight")
        weights.dtype = dtype_of(dtype, device, stored)
        head = find_mtp_weights(shape.model_type, weights.names) if mtp else frozenset[str]()
        if isinstance(head, str):
            logger.info("no drafts by an MTP head: %s", head)
            head = frozenset()
        decoder = build_decoder(shape, weights, weights.dtype, device, longest, head)
    return LoadedModel(decoder, path.name, longest)
