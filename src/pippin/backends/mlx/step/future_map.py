"""Sampled tokens by slot. A lazily evaluated array is a future: the host does not wait for it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

POISON = -1


class FutureMap:
    """One int32 cell per slot; row 0 is padding and reads as token 0.

    In debug mode the host mirrors which cells hold an unread token: reading a cell twice, or one
    that was never written, raises.
    """

    def __init__(self, num_slots: int, *, debug: bool = False) -> None:
        self.tokens = mx.zeros((num_slots + 1,), dtype=mx.int32)
        self._unread: set[int] | None = set() if debug else None

    def stash(self, slots: np.ndarray, tokens: mx.array) -> None:
        """Write one token per slot; any shape and integer type of `tokens` will do."""
        if len(slots) == 0:
            return
        flat = tokens.reshape(-1).astype(self.tokens.dtype)
        self.tokens[mx.array(slots.astype(np.int32))] = flat
        if self._unread is not None:
            self._unread.update(int(s) for s in slots)

    def resolve(self, slots: np.ndarray) -> mx.array:
        """Input ids of the rows whose slots these are, int32 [num_rows]; consumes them."""
        if self._unread is not None:
            for slot in slots[slots > 0].tolist():
                if slot not in self._unread:
                    raise RuntimeError(f"slot {slot} has no token to read, or it was read twice")
                self._unread.remove(slot)
        return self.tokens[mx.array(slots.astype(np.int32))]
