"""Inputs of drafts, by slot, that recurrent layers run once they are accepted. Knows no plans.

A recurrent state is written after a step's input token, which is always accepted; of the drafts
behind it the inputs of the convolution and of the gates are kept, a few kilobytes a layer. The next
step of the row, or its capture, runs those that were accepted first.
"""

from __future__ import annotations

import torch

from pippin.backends.torch.pools.layout import PoolLayout


class KeptInputs:
    def __init__(
        self, layout: PoolLayout, num_slots: int, max_depth: int, device: torch.device
    ) -> None:
        """Not touched before it is used: on CPUs unused memory takes none."""
        shape = (layout.num_recurrent_layers, num_slots + 1, max_depth, layout.kept_width)
        # [layers, slots, drafts, width]
        self.inputs = torch.empty(shape, dtype=layout.dtype, device=device)

    def keep(self, layer: int, slots: torch.Tensor, inputs: torch.Tensor) -> None:
        """Of the drafts of some rows: inputs [rows, drafts, width]."""
        self.inputs[layer][slots, : inputs.shape[1]] = inputs

    def of_layer(self, layer: int) -> torch.Tensor:
        """[slots, drafts, width]"""
        return self.inputs[layer]

    def of(self, layer: int, slots: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """[rows, num_drafts, width]; behind what is kept of a row it may be anything."""
        return self.inputs[layer][slots, :num_drafts]
