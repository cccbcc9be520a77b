"""Sampled tokens by slot, and what drafts make of a row, on the device. Knows no model.

Step N + 1 reads there what step N will have written. Both run on the forward stream, in the order
of launches: nothing waits, and nothing is read early.
"""

from __future__ import annotations

import numpy as np
import torch


class FutureMap:
    """int32 by slot; row 0 is padding and reads as token 0.

    `lengths` and `counts` are those after a row's last step that verified drafts, or that began
    before it was known what such a step accepted: other rows have lengths that the host knows.

    In debug mode the host mirrors which cells hold an unread token, and which drafts are unread:
    reading one twice, or one that was never written, raises.
    """

    def __init__(
        self, num_slots: int, device: torch.device, *, max_depth: int = 0, debug: bool = False
    ) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(num_slots + 1, *shape, dtype=torch.int32, device=device)

        self.tokens = zeros()
        self.drafts = zeros(max_depth)  # of a drafter on the device
        self.lengths = zeros()  # tokens that the row holds
        self.counts = zeros()  # of these, drafts that the last step accepted
        self._unread: set[int] | None = set() if debug else None
        self._unread_drafts: dict[int, int] = {}

    def stash(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write one token per slot; any shape and integer type of `tokens` will do."""
        if len(slots):
            self.tokens[slots] = tokens.reshape(-1).to(self.tokens.dtype)

    def resolve(self, slots: torch.Tensor) -> torch.Tensor:
        """Input ids of the rows whose slots these are, int64 [rows]."""
        return self.tokens[slots].long()

    def stash_drafts(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        """Write some drafts per slot, [slots, n] of any integer type."""
        if len(slots):
            self.drafts[slots, : drafts.shape[-1]] = drafts.to(self.drafts.dtype)

    def resolve_drafts(self, slots: torch.Tensor, depth: int) -> torch.Tensor:
        """int32 [rows, depth]"""
        return self.drafts[slots, :depth]

    def stash_lengths(
        self, slots: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """What rows hold after a step, and how many accepted drafts are among that."""
        if len(slots):
            self.lengths[slots] = lengths.reshape(-1).to(self.lengths.dtype)
            self.counts[slots] = counts.reshape(-1).to(self.counts.dtype)

    def note_written(self, slots: np.ndarray) -> None:
        if self._unread is not None:
            self._unread.update(slots.tolist())

    def note_read(self, slots: np.ndarray) -> None:
        if self._unread is None:
            return
        for slot in slots.tolist():
            if slot not in self._unread:
                raise RuntimeError(f"slot {slot} has no token to read, or it was read twice")
            self._unread.remove(slot)

    def note_drafts_written(self, slots: np.ndarray, num_drafts: int) -> None:
        if self._unread is not None:
            self._unread_drafts |= dict.fromkeys(slots.tolist(), num_drafts)

    def note_drafts_read(self, slot: int, depth: int) -> None:
        if self._unread is not None and self._unread_drafts.pop(slot, 0) < depth:
            raise RuntimeError(
                f"slot {slot} has no {depth} drafts to read, or they were read twice"
            )
