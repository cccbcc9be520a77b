"""A Mamba-2 layer around its recurrence: projections, convolution, time steps, gated norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from pippin.backends.torch.models.parts import Linear, Norm
from pippin.backends.torch.shapes import MambaShape


class MambaInputs(NamedTuple):
    """float32, what the recurrence reads."""

    x: torch.Tensor  # [n, heads, head_dim]
    b: torch.Tensor  # [n, groups, state_dim]
    c: torch.Tensor
    dt: torch.Tensor  # [n, heads]
    log_gate: torch.Tensor  # [n, heads]


@dataclass(frozen=True)
class MambaLayer:
    shape: MambaShape
    project: Linear  # rows: x, B, C | z | dt
    taps: torch.Tensor  # [num_taps, channels], the newest last
    conv_bias: torch.Tensor | None  # [channels]
    decay: torch.Tensor  # float32 [heads]: -exp(A_log)
    dt_bias: torch.Tensor  # float32 [heads]
    skip: torch.Tensor  # float32 [heads]: D
    norm: Norm  # of each group's channels
    out: Linear

    def split(self, projected: torch.Tensor) -> list[torch.Tensor]:
        """[n, rows] to the convolution's inputs, z and the time steps' inputs."""
        shape = self.shape
        return list(projected.split([shape.num_channels, shape.inner, shape.num_heads], dim=-1))

    def inputs(self, convolved: torch.Tensor, gates: torch.Tensor) -> MambaInputs:
        """convolved [n, channels]: the convolution's sums, before silu; gates [n, heads]: dt."""
        shape = self.shape
        groups = shape.num_groups * shape.state_dim
        x, b, c = F.silu(convolved.float()).split([shape.inner, groups, groups], dim=-1)
        x = x.unflatten(-1, (shape.num_heads, shape.head_dim))
        b, c = (part.unflatten(-1, (shape.num_groups, shape.state_dim)) for part in (b, c))
        dt = F.softplus(gates.float() + self.dt_bias).clamp(shape.least_dt, shape.most_dt)
        return MambaInputs(x, b, c, dt, self.decay * dt)

    def finish(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """y, float32 [n, heads, head_dim]; z [n, heads * head_dim]"""
        return self.out(self.normed(y.flatten(1) * F.silu(z.float())).to(z.dtype))

    def normed(self, gated: torch.Tensor) -> torch.Tensor:
        """[n, heads * head_dim]"""
        groups = gated.unflatten(-1, (self.shape.num_groups, -1))
        normed = F.rms_norm(groups, (groups.shape[-1],), eps=self.norm.eps)
        return normed.flatten(1) * self.norm.weight
