"""Keys and values of a drafter, by slot: those of a row's last tokens.

    cell of a token    its place, modulo the length; the first `num_first` places keep theirs
    tags[slot, cell]   whose keys these are: a place, or NOTHING

Outside the tree and the pools: a request starts with none, and what a step did not feed is missing.
That costs drafts, never a token. What rejected drafts left has a tag behind the row's end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pippin.backends.torch.models.mixers import AttentionLayer, Scoring

NOTHING = -1


def ring_bytes(mixers: Sequence[AttentionLayer], length: int, item_bytes: int) -> int:
    """Of one slot."""
    channels = sum(math.prod(mixer.shape.kv_parts) for mixer in mixers)
    return length * (channels * item_bytes + 4)


class DraftRing:
    def __init__(
        self,
        mixers: Sequence[AttentionLayer],  # of each layer
        num_slots: int,
        length: int,  # tokens
        dtype: torch.dtype,
        device: torch.device,
        num_first: int = 0,  # tokens that are never overwritten
    ) -> None:
        """Slot 0 is that of what is not to be kept."""
        self.length = length
        self.num_first = num_first
        self.kv = [
            torch.zeros(
                (num_slots + 1, 2, mixer.shape.num_kv_heads, length, mixer.shape.head_dim),
                dtype=dtype,
                device=device,
            )
            for mixer in mixers
        ]
        self.tags = torch.full((num_slots + 1, length), NOTHING, dtype=torch.int32, device=device)

    def start(self, slot: int) -> None:
        """Another text: nothing that the last one left is seen, NaN neither."""
        for kv in self.kv:
            kv[slot].zero_()
        self.tags[slot].fill_(NOTHING)

    def write(
        self,
        layer: int,
        slots: torch.Tensor,  # int64 [n]
        places: torch.Tensor,  # int64 [n]
        k: torch.Tensor,  # [n, kv heads, channels]
        v: torch.Tensor,
    ) -> None:
        cells = self._cells(places)
        self.kv[layer][slots, :, :, cells] = torch.stack([k, v], dim=1)
        if not layer:
            self.tags[slots, cells] = places.int()

    def attend(
        self,
        layer: int,
        q: torch.Tensor,  # [rows * n, heads, channels]
        slots: torch.Tensor,  # int64 [rows]
        places: torch.Tensor,  # int64 [rows, n]
        scoring: Scoring,
        bound: int | None = None,  # of the places; None: it is not known
    ) -> torch.Tensor:
        """[rows * n, heads, channels]: each over what its slot holds, up to its own place."""
        num_cells = self.length if bound is None else min(self.length, bound + 1)
        tags = self.tags[slots, None, :num_cells]
        behind = places[:, :, None] - tags
        seen = (tags != NOTHING) & (behind >= 0)
        recent = behind < self.length - self.num_first
        seen &= recent | (tags < self.num_first) if self.num_first else recent
        if scoring.window:
            seen &= behind < scoring.window
        kv = self.kv[layer][:, :, :, :num_cells][slots]
        k, v = kv[:, 0], kv[:, 1]  # [rows, kv heads, cells, channels]
        rows, num_kv_heads, (n, num_heads, channels) = len(k), k.shape[1], self._each(q, places)
        grouped = q.view(rows, n, num_kv_heads, -1, channels).permute(0, 2, 3, 1, 4)
        grouped = (grouped * scoring.scale).flatten(2, 3)  # [rows, kv heads, group * n, channels]
        scores = (grouped @ k.transpose(-1, -2)).float().unflatten(2, (-1, n))
        if scoring.softcap:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        # Of a row that sees nothing, which is none of a request's, numbers are numbers.
        scores = scores.masked_fill(~seen[:, None, None], torch.finfo(torch.float32).min)
        if scoring.sinks is not None:
            sinks = scoring.sinks.view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        shares = torch.softmax(scores, dim=-1)[..., :num_cells].to(v.dtype).flatten(2, 3)
        attended = (shares @ v).unflatten(2, (-1, n)).permute(0, 3, 1, 2, 4)
        return attended.reshape(-1, num_heads, channels)

    def _cells(self, places: torch.Tensor) -> torch.Tensor:
        if not self.num_first:
            return places % self.length
        first = self.num_first
        return torch.where(places < first, places, first + (places - first) % (self.length - first))

    def _each(self, q: torch.Tensor, places: torch.Tensor) -> tuple[int, int, int]:
        return places.shape[1], q.shape[1], q.shape[2]
