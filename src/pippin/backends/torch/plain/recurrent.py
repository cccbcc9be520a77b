"""What each kind of recurrent layer does behind its convolution, in plain torch operations."""

from __future__ import annotations

import torch

from pippin.backends.torch.models.delta_layer import DeltaLayer
from pippin.backends.torch.plain.blocks import Blocks
from pippin.backends.torch.plain.gated_delta import gated_delta_blocks, gated_delta_step


def recur_blocks(
    mixer: DeltaLayer,
    convolved: torch.Tensor,  # [tokens, channels]
    gates: torch.Tensor,  # [tokens, gates' inputs]
    blocks: Blocks,
    states: torch.Tensor,  # float32 [rows, heads, k_dim, v_dim]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `finish` reads of each token, and the state after each block [blocks, ...]."""
    return gated_delta_blocks(mixer.inputs(convolved, gates), blocks, states)


def recur_step(
    mixer: DeltaLayer,
    convolved: torch.Tensor,  # [rows, channels]
    gates: torch.Tensor,
    states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each row: the same, and the states after it."""
    return gated_delta_step(mixer.inputs(convolved, gates), states)
