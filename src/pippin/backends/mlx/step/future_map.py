"""By slot what the next step needs of the last: lazily evaluated arrays are futures.

The host does not wait for them. Knows no model and no rows.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np


class FutureMap:
    """int32 cells by slot; row 0 is padding.

    tokens   [slots]             sampled: the next input token
    drafts   [slots, max_depth]  of a drafter on the device, behind it
    lengths  [slots]             tokens that the row holds, where drafts may be in flight
    counts   [slots]             how many of these are drafts that the last step accepted

    In debug mode the host mirrors which cells hold an unread token or unread drafts: reading a cell
    twice, or one that was never written, raises.
    """

    def __init__(self, num_slots: int, *, max_depth: int = 0, debug: bool = False) -> None:
        self.tokens, self.lengths, self.counts = (
            mx.zeros((num_slots + 1,), dtype=mx.int32) for _ in range(3)
        )
        self.drafts = mx.zeros((num_slots + 1, max_depth), dtype=mx.int32)
        self._unread: set[int] | None = set() if debug else None
        self._unread_drafts: dict[int, int] = {}  # how many, by slot

    def arrays(self) -> list[mx.array]:
        return [self.tokens, self.drafts, self.lengths, self.counts]

    def stash(self, slots: np.ndarray, tokens: mx.array) -> None:
        """Write one token per slot; any shape and integer type of `tokens` will do."""
        if len(slots) == 0:
            return
        self.tokens[_index(slots)] = tokens.reshape(-1).astype(self.tokens.dtype)
        if self._unread is not None:
            self._unread.update(slots.tolist())

    def resolve(self, slots: np.ndarray) -> mx.array:
        """Input ids of the rows whose slots these are, int32 [num_rows]; consumes them."""
        if self._unread is not None:
            for slot in slots[slots > 0].tolist():
                if slot not in self._unread:
                    raise RuntimeError(f"slot {slot} has no token to read, or it was read twice")
                self._unread.remove(slot)
        return self.tokens[_index(slots)]

    def stash_drafts(self, slots: np.ndarray, drafts: mx.array) -> None:
        """Write some drafts per slot, [slots, n] of any integer type."""
        if len(slots) == 0:
            return
        num_drafts = drafts.shape[-1]
        self.drafts[_index(slots), :num_drafts] = drafts.astype(self.drafts.dtype)
        if self._unread is not None:
            self._unread_drafts |= dict.fromkeys(slots.tolist(), num_drafts)

    def resolve_drafts(self, slots: np.ndarray, depths: np.ndarray) -> mx.array:
        """int32 [num_rows, the largest of `depths`]; consumes them."""
        if self._unread is not None:
            for slot, depth in zip(slots.tolist(), depths.tolist(), strict=True):
                if slot and depth and self._unread_drafts.pop(slot, 0) < depth:
                    raise RuntimeError(
                        f"slot {slot} has no {depth} drafts to read, or they were read twice"
                    )
        return self.drafts[_index(slots), : max(depths.tolist(), default=0)]

    def stash_lengths(self, slots: np.ndarray, lengths: mx.array, counts: mx.array) -> None:
        """What rows hold after a step; lengths of padding stay 0."""
        if len(slots):
            index, real = _index(slots), mx.array(slots > 0)
            self.lengths[index] = lengths.astype(mx.int32) * real
            self.counts[index] = counts.astype(mx.int32) * real


def _index(slots: np.ndarray) -> mx.array:
    return mx.array(slots.astype(np.int32))
