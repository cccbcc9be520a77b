"""Keys and values of the MTP head, by slot: those of a row's last tokens. Knows no weights.

    cell of a token    its position, modulo LENGTH
    tags[slot, cell]   whose keys these are: a position, or NOTHING

Outside the tree and the pools: a request starts with none, and what a step did not feed is missing.
That costs drafts, never a token. What rejected drafts left has a tag behind the row's end.
"""

from __future__ import annotations

import torch

from pippin.backends.torch.models.attention_layer import AttentionLayer

LENGTH = 256  # tokens
NOTHING = -1


def ring_bytes(mixer: AttentionLayer, item_bytes: int) -> int:
    """Of one slot."""
    return LENGTH * (2 * mixer.num_kv_heads * mixer.head_dim * item_bytes + 4)


class HeadRing:
    def __init__(
        self,
        mixer: AttentionLayer,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        length: int = LENGTH,
    ) -> None:
        """Slot 0 is that of what is not to be kept."""
        self.length = length
        shape = (num_slots + 1, 2, mixer.num_kv_heads, length, mixer.head_dim)
        self._kv = torch.zeros(shape, dtype=dtype, device=device)
        self._tags = torch.full((num_slots + 1, length), NOTHING, dtype=torch.int32, device=device)

    def start(self, slot: int) -> None:
        """Another request: nothing that the last one left is seen, NaN neither."""
        self._kv[slot].zero_()
        self._tags[slot].fill_(NOTHING)

    def write(
        self,
        slots: torch.Tensor,  # int64 [n]
        positions: torch.Tensor,  # int64 [n]
        k: torch.Tensor,  # [n, kv heads, channels]
        v: torch.Tensor,
    ) -> None:
        cells = positions % self.length
        self._kv[slots, :, :, cells] = torch.stack([k, v], dim=1)
        self._tags[slots, cells] = positions.int()

    def attend(
        self,
        q: torch.Tensor,  # [rows, heads, channels]
        slots: torch.Tensor,  # int64 [rows]
        positions: torch.Tensor,  # int64 [rows]
        bound: int | None = None,  # of the positions; None: it is not known
    ) -> torch.Tensor:
        """[rows, heads, channels]: each over what its slot holds, up to its own position."""
        num_cells = self.length if bound is None else min(self.length, bound + 1)
        tags = self._tags[slots, :num_cells]
        behind = positions[:, None] - tags
        seen = (tags != NOTHING) & (behind >= 0) & (behind < self.length)
        kv = self._kv[:, :, :, :num_cells][slots]
        k, v = kv[:, 0], kv[:, 1]  # [rows, kv heads, cells, channels]
        grouped = q.unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5
        scores = (grouped @ k.transpose(-1, -2)).float()
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        shares = torch.softmax(scores, dim=-1).to(v.dtype)
        return (shares @ v).flatten(1, 2)
