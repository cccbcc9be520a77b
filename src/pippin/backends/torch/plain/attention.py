"""Attention over cells by torch's own attention: chunks of prompts, and one token a row.

Rows are attended one by one: what a row computes does not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812

if torch.cuda.is_available():  # it imports torch's compiler, which takes seconds
    from torch.nn.attention.bias import causal_lower_right


def attend_rows(
    q: torch.Tensor,  # [tokens, heads, channels]: the rows' new tokens, one row after the other
    kv: torch.Tensor,  # [cells, 2, kv heads, channels]
    lengths: Sequence[int],  # of the rows' new tokens
    cells: Sequence[torch.Tensor],  # int64, of each row those it sees, the new ones last
    window: int = 0,
) -> torch.Tensor:
    """[tokens, heads, channels]. Each token sees its row's tokens up to itself: as many as a
    window has, if there is one."""
    parts = [
        _attend(part, kv[own], window)
        for part, own in zip(q.split(list(lengths)), cells, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_masked(
    q: torch.Tensor,  # [tokens, heads, channels] of one row
    kv: torch.Tensor,  # [cells, 2, kv heads, channels]
    written: torch.Tensor,  # bool [cells]: others hold anything, NaN too
    mask: torch.Tensor,  # bool [tokens, cells]: what each token sees
) -> torch.Tensor:
    """[tokens, heads, channels], where it is not known on the host how long the row is."""
    known = kv.masked_fill(~written[:, None, None, None], 0.0)
    k, v = known.permute(1, 2, 0, 3)[:, None]
    queries = q.transpose(0, 1)[None]
    y = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, enable_gqa=True)
    return y[0].transpose(0, 1)


def _attend(q: torch.Tensor, kv: torch.Tensor, window: int) -> torch.Tensor:
    num_new, num_seen = len(q), len(kv)
    queries = q.transpose(0, 1)[None]
    k, v = kv.permute(1, 2, 0, 3)[:, None]
    if window and num_seen > window:
        mask = _banded(num_new, num_seen, window, q.device)
        y = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, enable_gqa=True)
        return y[0].transpose(0, 1)
    square = num_new == num_seen
    mask = None if square or num_new == 1 else _lower_right(num_new, num_seen, q.device)
    y = F.scaled_dot_product_attention(
        queries, k, v, attn_mask=mask, is_causal=square and num_new > 1, enable_gqa=True
    )
    return y[0].transpose(0, 1)


def _lower_right(num_new: int, num_seen: int, device: torch.device) -> torch.Tensor:
    """Causal, with the last token seeing everything. As a bias where that is a fused kernel."""
    if device.type == "cuda":
        return causal_lower_right(num_new, num_seen)
    ones = torch.ones(num_new, num_seen, dtype=torch.bool)
    return ones.tril(num_seen - num_new)


def _banded(num_new: int, num_seen: int, window: int, device: torch.device) -> torch.Tensor:
    """The same, where no token sees further back than the window."""
    ones = torch.ones(num_new, num_seen, dtype=torch.bool, device=device)
    offset = num_seen - num_new
    return ones.tril(offset).triu(offset - window + 1)
