"""An attention layer around its attention: projections, norms of heads, rotation, the gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from pippin.backends.torch.models.parts import Linear, Norm
from pippin.backends.torch.models.rope import Rope
from pippin.backends.torch.shapes import AttentionShape


class Projected(NamedTuple):
    q: torch.Tensor  # [n, heads, channels]
    k: torch.Tensor  # [n, kv heads, channels]
    v: torch.Tensor
    gate: torch.Tensor | None  # [n, heads * channels]


@dataclass(frozen=True)
class Scoring:
    """What tokens see, and how much of it."""

    scale: float
    window: int = 0  # tokens that one sees, itself included; 0: all before it
    softcap: float = 0.0  # 0: there is none
    sinks: torch.Tensor | None = None  # float32 [heads]


@dataclass(frozen=True)
class AttentionLayer:
    shape: AttentionShape
    qkv: Linear  # rows: queries, gates if there are any, keys, values
    out: Linear
    rope: Rope
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sinks: torch.Tensor | None = None  # float32 [heads]

    @property
    def scoring(self) -> Scoring:
        shape = self.shape
        return Scoring(shape.scale, shape.window, shape.softcap, self.sinks)

    @property
    def head_norms(self) -> tuple[Norm, Norm] | None:
        """Those that kernels take: of each head, with one weight for all of them."""
        norms = self.q_norm, self.k_norm
        if self.shape.qk_norm != "head" or norms[0] is None or norms[1] is None:
            return None
        return None if norms[0].centred or norms[0].weight.dim() > 1 else (norms[0], norms[1])

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projected:
        """x [n, hidden]"""
        q, gate, k, v = self._split(self.normed(self.qkv(x)))
        q, k, v = (part.unflatten(-1, (-1, self.shape.head_dim)) for part in (q, k, v))
        if (norms := self.head_norms) is not None:
            q, k = norms[0](q), norms[1](k)
        q, k = self.rope.rotate(q, positions), self.rope.rotate(k, positions)
        return Projected(q, k, v, gate if self.shape.gated else None)

    def normed(self, qkv: torch.Tensor) -> torch.Tensor:
        """With norms that kernels do not take."""
        if self.q_norm is None or self.k_norm is None or self.head_norms is not None:
            return qkv
        q, gate, k, v = self._split(qkv)
        if self.shape.qk_norm == "head":
            q, k = (part.unflatten(-1, (-1, self.shape.head_dim)) for part in (q, k))
        q, k = self.q_norm(q), self.k_norm(k)
        return torch.cat([q.flatten(1), gate, k.flatten(1), v], dim=-1)

    def gate_of(self, qkv: torch.Tensor) -> torch.Tensor | None:
        return self._split(qkv)[1] if self.shape.gated else None

    def _split(self, qkv: torch.Tensor) -> list[torch.Tensor]:
        shape = self.shape
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        return list(qkv.split([q_size, q_size * shape.gated, kv_size, kv_size], dim=-1))

    def gated(self, attended: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        """attended [n, heads, channels], to what the last product reads."""
        y = attended.flatten(1)
        return y if gate is None else y * torch.sigmoid(gate)

    def finish(self, attended: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        return self.out(self.gated(attended, gate))
