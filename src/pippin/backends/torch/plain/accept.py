"""Which drafts are accepted, and noise of tokens whose number the device knows. Knows no rows."""

from __future__ import annotations

import torch


def accepted(drawn: torch.Tensor, drafts: torch.Tensor, stop_ids: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: how many drafts, [rows, depth], equal what was drawn before them, [rows,
    depth + 1]; none behind one that differs, nor behind a stop id, [rows, n]."""
    before = drawn[:, :-1]
    is_stop = (before[:, :, None] == stop_ids[:, None, :]).any(dim=-1)
    right = (before == drafts) & ~is_stop
    return right.long().cumprod(dim=1).sum(dim=1)


def noise_words(streams: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """int32 [n, 2]: `noise_keys` of streams, the bits of uint64 [n], and of tokens' numbers."""
    return (streams + numbers).view(torch.int32).view(-1, 2)
