"""Which tokens penalised slots have read and written, on the device. Knows no penalties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

import numpy as np

from pippin.backends.sampling.batches import A, Send


class TokenHistory(Generic[A]):
    """Rows of [vocab_size], kept only while a slot runs.

    The rows of the slots sampled last are stacked in one table, the value that a step makes and the
    next one reads; other slots keep rows of their own. A table over all slots would be copied whole
    at every step where arrays are values (mlx), because the step in flight still reads it.
    """

    def __init__(
        self,
        vocab_size: int,
        send: Send[A],
        stack: Callable[[Sequence[A]], A],
        count_each: Callable[[A, A], A],
    ) -> None:
        """`count_each`: a table of counts with one more of each row's token."""
        self._vocab_size = vocab_size
        self._send = send
        self._stack = stack
        self._count_each = count_each
        self._prompts: dict[int, A] = {}  # bool [vocab_size] by slot
        self._counts: dict[int, A] = {}  # float32 [vocab_size] by slot
        self._stacked: tuple[int, ...] = ()
        self._tables: tuple[A, A] | None = None  # of prompts and counts: [len(_stacked), V]

    def admit(self, slot: int, prompt: np.ndarray, reply: np.ndarray) -> None:
        self.retire(slot)
        seen = np.zeros(self._vocab_size, dtype=np.bool_)
        seen[prompt] = True
        self._prompts[slot] = self._send(seen)
        self._counts[slot] = self._counted(reply)

    def count(self, slot: int, tokens: np.ndarray) -> None:
        """The slot has written these."""
        self._unstack()
        self._counts[slot] = self._counts[slot] + self._counted(tokens)

    def retire(self, slot: int) -> None:
        if slot in self._counts:
            self._unstack()
            del self._prompts[slot], self._counts[slot]

    def tables(self, slots: tuple[int, ...]) -> tuple[A, A]:
        """What the prompts contain, bool, and counts in the replies, float32: [len(slots), V]."""
        if slots != self._stacked or self._tables is None:
            self._unstack()
            self._stacked = slots
            prompts = self._stack([self._prompts[slot] for slot in slots])
            self._tables = prompts, self._stack([self._counts[slot] for slot in slots])
        return self._tables

    def append(self, slots: tuple[int, ...], tokens: A) -> A:
        """Count one more token, [len(slots)], of each slot; returns the new table of counts."""
        prompts, counts = self.tables(slots)
        counts = self._count_each(counts, tokens)
        self._tables = prompts, counts
        return counts

    def _counted(self, tokens: np.ndarray) -> A:
        counts = np.bincount(tokens, minlength=self._vocab_size)
        return self._send(counts.astype(np.float32))

    def _unstack(self) -> None:
        if self._tables is not None:
            for row, slot in enumerate(self._stacked):
                self._counts[slot] = self._tables[1][row]
        self._stacked, self._tables = (), None
