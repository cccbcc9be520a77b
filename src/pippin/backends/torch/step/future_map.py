"""Sampled tokens by slot, on the device. Step N + 1 reads there what step N will have written.

Both run on the forward stream, in the order of launches: nothing waits, and nothing is read early.
"""

from __future__ import annotations

import numpy as np
import torch


class FutureMap:
    """One int32 cell per slot; row 0 is padding and reads as token 0.

    In debug mode the host mirrors which cells hold an unread token: reading a cell twice, or one
    that was never written, raises.
    """

    def __init__(self, num_slots: int, device: torch.device, *, debug: bool = False) -> None:
        self.tokens = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self._unread: set[int] | None = set() if debug else None

    def stash(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write one token per slot; any shape and integer type of `tokens` will do."""
        if len(slots):
            self.tokens[slots] = tokens.reshape(-1).to(self.tokens.dtype)

    def resolve(self, slots: torch.Tensor) -> torch.Tensor:
        """Input ids of the rows whose slots these are, int64 [rows]."""
        return self.tokens[slots].long()

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
