"""Latent attention over cells, in plain torch operations. Knows no rows: a caller goes from one to
the next, so what a row computes does not depend on the others."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from pippin.backends.torch.models.latent_layer import LatentLayer
from pippin.types import GRID


def attend_latent(
    layer: LatentLayer,
    q: torch.Tensor,  # [tokens, heads, key channels]: the new tokens of one row
    cells: torch.Tensor,  # [cells, channels]: those it sees, the new ones last
    mask: torch.Tensor | None = None,  # bool [tokens, cells]. None: each sees those up to itself
) -> torch.Tensor:
    """[tokens, heads, value channels]"""
    num_new, num_seen = len(q), len(cells)
    if mask is None and num_new > 1:
        ones = torch.ones(num_new, num_seen, dtype=torch.bool, device=q.device)
        mask = ones.tril(num_seen - num_new)
    scale = layer.shape.scale
    if num_new >= GRID:
        k, v = layer.expand(cells)
        y = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask, scale=scale)
        return y.transpose(0, 1)
    absorbed = layer.absorb(q)
    # All heads' queries of all tokens, over one set of keys.
    scores = (absorbed.flatten(0, 1) @ cells.mT).unflatten(0, absorbed.shape[:2]).float() * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    shares = torch.softmax(scores, dim=-1).to(q.dtype).flatten(0, 1)
    latents = cells[:, : layer.shape.rank]
    return layer.values_of((shares @ latents).unflatten(0, absorbed.shape[:2]))
