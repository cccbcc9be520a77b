"""A Gated DeltaNet layer around its recurrence: projections, convolution, gates, gated norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from pippin.backends.torch.models.parts import Linear, Norm
from pippin.backends.torch.shapes import DeltaShape


class Inputs(NamedTuple):
    """float32, what the recurrence reads. Queries and keys of norm 1, queries scaled."""

    q: torch.Tensor  # [n, key heads, k_dim]
    k: torch.Tensor
    v: torch.Tensor  # [n, value heads, v_dim]
    log_gate: torch.Tensor  # [n, value heads]
    beta: torch.Tensor


@dataclass(frozen=True)
class DeltaLayer:
    shape: DeltaShape
    project: Linear  # rows: queries, keys, values | z | b | a
    taps: torch.Tensor  # [num_taps, channels], the newest last
    decay: torch.Tensor  # float32 [value heads]: -exp(A_log)
    dt_bias: torch.Tensor  # float32 [value heads]
    norm: Norm  # of a head's values
    out: Linear
    conv_bias: torch.Tensor | None = None  # [channels]

    def split(self, projected: torch.Tensor) -> list[torch.Tensor]:
        """[n, rows] to the convolution's inputs, z and the gates' inputs."""
        heads = self.shape.num_v_heads
        sizes = [self.shape.num_channels, heads * self.shape.v_dim, 2 * heads]
        return list(projected.split(sizes, dim=-1))

    def inputs(self, convolved: torch.Tensor, gates: torch.Tensor) -> Inputs:
        """convolved [n, channels]: the convolution's sums, before silu; gates: b | a."""
        shape = self.shape
        b, a = gates.chunk(2, dim=-1)
        mixed = F.silu(convolved.float())
        k_size = shape.num_k_heads * shape.k_dim
        q, k, v = mixed.split([k_size, k_size, shape.num_v_heads * shape.v_dim], dim=-1)
        q, k = (_unit(x.unflatten(-1, (shape.num_k_heads, shape.k_dim))) for x in (q, k))
        log_gate = self.decay * F.softplus(a.float() + self.dt_bias)
        v = v.unflatten(-1, (shape.num_v_heads, shape.v_dim))
        return Inputs(q * shape.k_dim**-0.5, k, v, log_gate, torch.sigmoid(b.float()))

    def finish(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """y, float32 [n, value heads, v_dim]; z [n, value heads * v_dim]"""
        gate = F.silu(z.float()).unflatten(-1, (self.shape.num_v_heads, self.shape.v_dim))
        return self.out((self.norm(y) * gate).to(z.dtype).flatten(1))


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)
