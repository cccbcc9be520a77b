"""Latent attention around its attention: a token is kept as one small vector that all heads share.

    cell   [ latent, normed | key, rotated ]      rank + rotated channels
    key of a head     [ up_k latent | rotated ]    value of a head   up_v latent

A head's query may be brought to the latents (`absorb`), so that no key is made of them; or keys and
values may be made of them (`expand`), which is less work where there are many queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pippin.backends.torch.models.parts import Linear, Norm
from pippin.backends.torch.models.rope import Rope
from pippin.backends.torch.shapes import LatentShape


@dataclass(frozen=True)
class LatentLayer:
    shape: LatentShape
    project: Linear  # rows: queries, or what they are made of | latent | key to rotate
    query_norm: Norm | None  # where queries are made in two steps
    query_up: Linear | None
    latent_norm: Norm
    up_k: torch.Tensor  # [heads, channels of a key that are not rotated, rank]
    up_v: torch.Tensor  # [heads, channels of a value, rank]
    rope: Rope
    out: Linear

    def placed(
        self, projected: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [n, heads, key channels], the rotated ones last, and cells [n, channels]."""
        shape = self.shape
        first = projected.shape[-1] - shape.rank - shape.rope.dim
        q, latent, key = projected.split([first, shape.rank, shape.rope.dim], dim=-1)
        if self.query_norm is not None and self.query_up is not None:
            q = self.query_up(self.query_norm(q))
        q = q.unflatten(-1, (shape.num_heads, -1))
        plain, turned = q.split([shape.plain_dim, shape.rope.dim], dim=-1)
        q = torch.cat([plain, self.rope.rotate(turned, positions)], dim=-1)
        key = self.rope.rotate(key[:, None], positions)[:, 0]
        return q, torch.cat([self.latent_norm(latent), key], dim=-1)

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """[n, heads, key channels] to [heads, n, channels of a cell]."""
        plain, turned = q.transpose(0, 1).split([self.shape.plain_dim, self.shape.rope.dim], dim=-1)
        return torch.cat([plain @ self.up_k, turned], dim=-1)

    def values_of(self, attended: torch.Tensor) -> torch.Tensor:
        """Sums of latents [heads, n, rank] to values' [n, heads, value channels]."""
        return (attended @ self.up_v.mT).transpose(0, 1)

    def expand(self, cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [heads, cells, key channels] and values of cells [cells, channels]."""
        latent, key = cells.split([self.shape.rank, self.shape.rope.dim], dim=-1)
        turned = key.expand(self.shape.num_heads, *key.shape)
        return torch.cat([latent @ self.up_k.mT, turned], dim=-1), latent @ self.up_v.mT
