"""A short convolution as a layer (LFM2): its last inputs are all that it remembers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pippin.backends.torch.models.parts import Linear
from pippin.backends.torch.shapes import ConvShape


@dataclass(frozen=True)
class ConvLayer:
    shape: ConvShape
    project: Linear  # rows: B, C, x
    taps: torch.Tensor  # [num_taps, channels], the newest last
    conv_bias: torch.Tensor | None  # [channels]
    out: Linear

    def split(self, projected: torch.Tensor) -> list[torch.Tensor]:
        """[n, rows] to the convolution's inputs, what its sums are multiplied with, and no
        gates."""
        b, c, x = projected.chunk(3, dim=-1)
        return [b * x, c, projected[:, :0]]

    def finish(self, convolved: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return self.out(convolved * c)
