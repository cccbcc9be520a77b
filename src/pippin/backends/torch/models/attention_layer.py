"""An attention layer around its attention: projections, norms of heads, rotation, the gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from pippin.backends.torch.models.parts import Linear, Norm
from pippin.backends.torch.models.rope import Rope


class Projected(NamedTuple):
    q: torch.Tensor  # [n, heads, channels]
    k: torch.Tensor  # [n, kv heads, channels]
    v: torch.Tensor
    gate: torch.Tensor | None  # [n, heads * channels]


@dataclass(frozen=True)
class AttentionLayer:
    qkv: Linear  # rows: queries, gates if there are any, keys, values
    out: Linear
    rope: Rope
    num_heads: int
    num_kv_heads: int
    head_dim: int
    gated: bool
    window: int = 0  # tokens that one sees, itself included; 0: all before it
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projected:
        """x [n, hidden]"""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = [q_size, q_size * self.gated, kv_size, kv_size]
        q, gate, k, v = self.qkv(x).split(sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope.rotate(q, positions), self.rope.rotate(k, positions)
        return Projected(q, k, v, gate if self.gated else None)

    def finish(self, attended: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """attended [n, heads, channels]"""
        y = attended.flatten(1)
        return self.out(y if gate is None else y * torch.sigmoid(gate))
