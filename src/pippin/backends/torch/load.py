"""A checkpoint to a decoder on a device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pippin.amounts import show_bytes
from pippin.backends.mtp_weights import find_mtp_weights
from pippin.backends.torch.checkpoint import open_weights
from pippin.backends.torch.config import read_config, read_shape, suit_kernels
from pippin.backends.torch.device import dtype_of, find_device
from pippin.backends.torch.models.build import build_decoder
from pippin.backends.torch.models.decoder import Decoder
from pippin.backends.torch.shapes import AttentionShape
from pippin.errors import LoadError

logger = logging.getLogger(__name__)

# Whose type is the checkpoint's: the first one that is there and not packed.
TYPED = ("embed_tokens.weight", "embed_tokens.scales", "norm.weight")


@dataclass(frozen=True)
class LoadedModel:
    decoder: Decoder
    name: str
    max_len: int
    draft: Decoder | None = None  # a smaller model of the same tokenizer


def load(
    path: Path,
    *,
    dtype: str = "auto",
    max_len: int | None = None,
    device: torch.device | None = None,
    mtp: bool = False,
    draft: Path | None = None,
    kernels: bool | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> LoadedModel:
    """`mtp`: with its MTP head, if it has one; what is missing is logged. `draft`: the checkpoint
    of a draft model, in the same type. `kernels`: whether Triton's may serve it, which read one
    table of cells. None: on GPUs."""
    try:
        loaded = _load(path, dtype, max_len, device, mtp, progress, kernels)
        return loaded if draft is None else _with_draft(loaded, draft, progress)
    except torch.OutOfMemoryError as error:
        parts = [path] if draft is None else [path, draft]
        files = [file for part in parts for file in part.glob("model*.safetensors")]
        nbytes = sum(file.stat().st_size for file in files)
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
    kernels: bool | None = None,
) -> LoadedModel:
    progress("reading the checkpoint")
    shape = read_shape(read_config(path))
    device = device or find_device()
    if kernels or (kernels is None and device.type == "cuda"):
        kept = shape.keeping_all()
        shape = kept if suit_kernels(kept) else shape
    longest = max_len or shape.max_len
    progress("loading weights")
    with open_weights(path, device, shape.prefix) as weights:
        names = (shape.stored_name(f"{shape.prefix}{name}") for name in TYPED)
        stored = weights.stored_dtype(*names)
        weights.dtype = dtype_of(dtype, device, stored)
        head = find_mtp_weights(shape.model_type, weights.names) if mtp else frozenset[str]()
        if isinstance(head, str):
            logger.info("no drafts by an MTP head: %s", head)
            head = frozenset()
        decoder = build_decoder(shape, weights, weights.dtype, device, longest, head)
    return LoadedModel(decoder, path.name, longest)


def _with_draft(loaded: LoadedModel, path: Path, progress: Callable[[str], None]) -> LoadedModel:
    progress("loading the draft model")
    decoder = loaded.decoder
    shape = read_shape(read_config(path))
    mixers = [layer.mixer for layer in shape.layers if layer.mixer is not None]
    if not all(isinstance(mixer, AttentionShape) for mixer in mixers):
        kind = "latent attention" if shape.recurrent is None else "recurrent states"
        raise LoadError(
            f"draft_model: {path.name} is a {shape.model_type} with {kind}, and a draft model has "
            "plain attention alone: use another one, or --speculate mtp or suffix"
        )
    dtype = str(decoder.dtype).removeprefix("torch.")
    longest = min(shape.max_len, loaded.max_len)
    found = _load(path, dtype, longest, decoder.device, False, lambda _: None)
    return replace(loaded, draft=found.decoder)
