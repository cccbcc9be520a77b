"""What each kind of recurrent layer does behind its convolution, in plain torch operations."""

from __future__ import annotations

import torch

from pippin.backends.torch.models.conv_layer import ConvLayer
from pippin.backends.torch.models.decoder import RecurrentLayer
from pippin.backends.torch.models.mamba_layer import MambaLayer
from pippin.backends.torch.plain.blocks import Blocks
from pippin.backends.torch.plain.gated_delta import gated_delta_blocks, gated_delta_step
from pippin.backends.torch.plain.mamba import mamba_blocks, mamba_step


def recur_blocks(
    mixer: RecurrentLayer,
    convolved: torch.Tensor,  # [tokens, channels]
    gates: torch.Tensor,  # [tokens, gates' inputs]
    blocks: Blocks,
    states: torch.Tensor,  # float32 [rows, heads, k_dim, v_dim]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `finish` reads of each token, and the state after each block [blocks, ...]."""
    if isinstance(mixer, ConvLayer):
        return convolved, states.new_empty(sum(blocks.counts), *states.shape[1:])
    if isinstance(mixer, MambaLayer):
        return mamba_blocks(mixer.inputs(convolved, gates), mixer.skip, blocks, states)
    return gated_delta_blocks(mixer.inputs(convolved, gates), blocks, states)


def recur_step(
    mixer: RecurrentLayer,
    convolved: torch.Tensor,  # [rows, channels]
    gates: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each row: the same, and the states after it."""
    if isinstance(mixer, ConvLayer):
        return convolved, states
    if isinstance(mixer, MambaLayer):
        return mamba_step(mixer.inputs(convolved, gates), mixer.skip, states)
    return gated_delta_step(mixer.inputs(convolved, gates), states)


def convolve_step(mixer: RecurrentLayer, source: torch.Tensor) -> torch.Tensor:
    """One token of each row: source [rows, num_taps, channels], the newest input last."""
    convolved = (source * mixer.taps).sum(dim=1)
    return convolved if mixer.conv_bias is None else convolved + mixer.conv_bias
