"""Tries Triton's kernels on a loaded model. Compares nothing itself."""

from __future__ import annotations

import torch

from pippin.backends.torch.kernels.checks.agreement import KernelSet, kernels_agree
from pippin.backends.torch.models.decoder import Decoder
from pippin.types import GRID


def our_kernels_agree(decoder: Decoder, max_len: int) -> bool:
    """On the current stream. Models of very short texts are not tried: rows do not fit."""
    if max_len < 2 * GRID:
        return True
    with torch.inference_mode():
        return kernels_agree(decoder, our_kernels)


def our_kernels() -> KernelSet:
    # Triton is not everywhere.
    from pippin.backends.torch.kernels.decode import DecodeKernels
    from pippin.backends.torch.kernels.experts.feed_forward import feed_forward
    from pippin.backends.torch.kernels.prefill import ChunkKernels
    from pippin.backends.torch.kernels.prompt import PromptKernels
    from pippin.backends.torch.kernels.top_p import least_in_top_p

    return KernelSet(DecodeKernels, ChunkKernels, PromptKernels, feed_forward, least_in_top_p)
