"""Attention over cells in plain operations: by torch's own where that knows it; and of latents.

Rows are attended one by one: what a row computes does not depend on the other rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch.backends.cuda import (
    SDPAParams,
    can_use_efficient_attention,
    can_use_flash_attention,
)

from pippin.backends.torch.models.mixers import LatentLayer, Scoring
from pippin.backends.torch.step.batches import SeenCells
from pippin.types import GRID

LOWER_RIGHT = 2  # of the efficient kernel's masks
FLASH_CHANNELS = 8  # those of a head are a multiple


def attend_row(
    q: torch.Tensor,  # [tokens, heads, channels]: the new tokens of one row
    kv: torch.Tensor,  # [cells, 2, kv heads, channels]
    seen: SeenCells,
    scoring: Scoring,
) -> torch.Tensor:
    """[tokens, heads, channels]. Each token sees its row's tokens up to itself: as many as a
    window has, if there is one."""
    known, mask = kv[seen.cells], seen.mask
    if mask is None or seen.written is None:
        return _attend(q, known, scoring)
    # In place, since a budget counts one gather: what is not written may be NaN.
    known.masked_fill_(~seen.written[:, None, None, None], 0.0)
    if scoring.window:
        place = torch.arange(mask.shape[1], device=mask.device)
        own = (place * mask).amax(dim=1, keepdim=True)
        mask = mask & (place > own - scoring.window)
    return _softmax(q, known, mask, scoring)


def _attend(q: torch.Tensor, kv: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    num_new, num_seen = len(q), len(kv)
    if scoring.window and num_seen > scoring.window:
        return _softmax(q, kv, _banded(num_new, num_seen, scoring.window, q.device), scoring)
    if num_new == 1:
        return _softmax(q, kv, None, scoring)
    if _is_torchs(scoring):
        if num_new == num_seen:
            return _torchs(q, kv, None, scoring, is_causal=True)
        if (fused := _fused_lower_right(q, kv, scoring.scale)) is not None:
            return fused
    return _softmax(q, kv, _lower_right(num_new, num_seen, q.device), scoring)


def _is_torchs(scoring: Scoring) -> bool:
    """Whether torch's own attention knows it."""
    return scoring.sinks is None and not scoring.softcap


def _softmax(
    q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    if _is_torchs(scoring):
        return _torchs(q, kv, mask, scoring)
    num_kv_heads = kv.shape[2]
    k, v = kv.permute(1, 2, 0, 3).float()
    grouped = q.float().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    scores = grouped @ k[:, None].mT * scoring.scale  # [kv heads, heads of each, tokens, cells]
    if scoring.softcap:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if scoring.sinks is not None:
        sinks = scoring.sinks.view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    shares = torch.softmax(scores, dim=-1)[..., : kv.shape[0]]
    return (shares @ v[:, None]).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)


def _torchs(
    q: torch.Tensor,
    kv: torch.Tensor,
    mask: torch.Tensor | None,
    scoring: Scoring,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    k, v = kv.permute(1, 2, 0, 3)[:, None]
    y = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scoring.scale,
        enable_gqa=True,
    )
    return y[0].transpose(0, 1)


def _fused_lower_right(q: torch.Tensor, kv: torch.Tensor, scale: float) -> torch.Tensor | None:
    """Causal, with the last token seeing everything, without a mask; None if no kernel can.

    As `causal_lower_right` of torch.nn.attention.bias does it, whose import brings torch's
    compiler: seconds of every start.
    """
    if q.device.type != "cuda":
        return None
    k, v = kv.permute(1, 2, 0, 3)[:, None]
    q = q.transpose(0, 1)[None]
    params = SDPAParams(q, k, v, None, 0.0, False, True)
    if q.shape[-1] % FLASH_CHANNELS == 0 and can_use_flash_attention(params):
        y = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal=True, return_debug_mask=False, scale=scale
        )[0]
        return y[0].transpose(0, 1)
    if can_use_efficient_attention(params):
        y = torch.ops.aten._efficient_attention_forward(
            *(x.transpose(1, 2) for x in (q, k, v)),
            bias=None,
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            max_seqlen_q=None,
            max_seqlen_k=None,
            dropout_p=0.0,
            custom_mask_type=LOWER_RIGHT,
            compute_log_sumexp=False,
            scale=scale,
            seqlen_k=None,
        )[0]
        return y[0]
    return None


def _lower_right(num_new: int, num_seen: int, device: torch.device) -> torch.Tensor:
    ones = torch.ones(num_new, num_seen, dtype=torch.bool, device=device)
    return ones.tril(num_seen - num_new)


def _banded(num_new: int, num_seen: int, window: int, device: torch.device) -> torch.Tensor:
    """The same, where no token sees further back than the window."""
    ones = torch.ones(num_new, num_seen, dtype=torch.bool, device=device)
    offset = num_seen - num_new
    return ones.tril(offset).triu(offset - window + 1)


def attend_latent(
    layer: LatentLayer,
    q: torch.Tensor,  # [tokens, heads, key channels]: the new tokens of one row
    kept: torch.Tensor,  # [cells, channels]
    seen: SeenCells,
) -> torch.Tensor:
    """[tokens, heads, value channels]"""
    cells, mask = kept[seen.cells], seen.mask
    if seen.written is not None:
        cells.masked_fill_(~seen.written[:, None], 0.0)
    num_new, num_seen = len(q), len(cells)
    if mask is None and num_new > 1:
        mask = _lower_right(num_new, num_seen, q.device)
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
