"""By slot: requests as they were admitted, and what the next step needs of the last one.

Row 0 is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from pippin.backends.base import MAX_STOP_IDS, Admit, DecodeRow, PrefillRow
from pippin.backends.sampling.batches import A
from pippin.backends.sampling.sampler import Sampler, SampleRow

NO_STOP_ID = -1  # equals no token


@dataclass(frozen=True)
class Arrays(Generic[A]):
    """What a step asks of a library of arrays."""

    zeros: Callable[..., A]  # int32, of this shape
    index: Callable[[np.ndarray], A]  # of rows, on the device
    put: Callable[[A, Any, A], None]  # into an array, at these places, numbers of any type
    join: Callable[[Sequence[A]], A]  # along the first axis


class SlotTable(Generic[A]):
    """What each request was admitted with, and how it samples."""

    def __init__(self, num_slots: int, sampler: Sampler[A]) -> None:
        self.sampler = sampler
        self._admitted: dict[int, Admit] = {}
        self.prompt_lens = np.zeros(num_slots + 1, dtype=np.int64)
        self.streams = np.zeros(num_slots + 1, dtype=np.uint64)  # of their noise
        self.stop_ids = np.full((num_slots + 1, MAX_STOP_IDS), NO_STOP_ID, dtype=np.int32)

    def __bool__(self) -> bool:
        """Whether a request runs."""
        return bool(self._admitted)

    def __getitem__(self, slot: int) -> Admit:
        return self._admitted[slot]

    def admit(self, admit: Admit) -> None:
        self._admitted[admit.slot] = admit
        self.prompt_lens[admit.slot] = len(admit.prompt)
        self.sampler.admit(admit)
        self.streams[admit.slot] = self.sampler.of(admit.slot).stream
        self.stop_ids[admit.slot] = NO_STOP_ID
        stop_ids = admit.stop_ids[:MAX_STOP_IDS]  # a request that has more verifies no drafts
        self.stop_ids[admit.slot, : len(stop_ids)] = stop_ids

    def retire(self, slot: int) -> None:
        self.sampler.retire(slot)
        self._admitted.pop(slot, None)  # a slot whose launch failed may hold nothing

    def clear(self) -> None:
        self._admitted.clear()

    def num_generated(self, slots: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Tokens of the replies that were sampled, of rows that hold so many tokens: int64."""
        found: np.ndarray = ends - self.prompt_lens[slots]
        return found

    def are_greedy(self, slots: np.ndarray) -> bool:
        """Whether none of them draws noise."""
        return all(self.sampler.of(slot).is_greedy for slot in slots.tolist())

    def sample_row(self, row: DecodeRow | PrefillRow) -> SampleRow:
        return SampleRow(row.slot, row.end - int(self.prompt_lens[row.slot]))

    def continues_reply(self, row: PrefillRow) -> bool:
        """Its slot has sampled before: the chunk begins with that token."""
        admit = self._admitted[row.slot]
        return len(row.tokens) > 0 and row.start >= len(admit.prompt) + len(admit.reply)

    def num_top_logprobs(self, slot: int) -> int | None:
        admit = self._admitted.get(slot)
        return None if admit is None else admit.params.logprobs


class FutureMap(Generic[A]):
    """int32 on the device: step N + 1 reads there what step N will have written. Nothing waits.

    tokens   [slots]             sampled: the next input token
    drafts   [slots, max_depth]  of a drafter on the device, behind it
    lengths  [slots]             tokens that the row holds, where drafts may be in flight
    counts   [slots]             of these, drafts that the last step accepted

    In debug mode the host mirrors which cells hold an unread token, and which drafts are unread:
    to note that one is read twice, or that was never written, raises.
    """

    def __init__(
        self, arrays: Arrays[A], num_slots: int, *, max_depth: int = 0, debug: bool = False
    ) -> None:
        self._put = arrays.put
        rows = num_slots + 1
        self.tokens, self.lengths, self.counts = (arrays.zeros(rows) for _ in range(3))
        self.drafts = arrays.zeros(rows, max_depth)
        self._unread: set[int] | None = set() if debug else None
        self._unread_drafts: dict[int, int] = {}  # how many, by slot

    def arrays(self) -> list[A]:
        return [self.tokens, self.drafts, self.lengths, self.counts]

    # ---- on the device; `slots`: as it indexes ----------------------------------------------

    def stash(self, slots: Any, tokens: Any) -> None:
        """One token per slot, in any shape."""
        if len(slots):
            self._put(self.tokens, slots, tokens.reshape(-1))

    def stash_drafts(self, slots: Any, drafts: Any) -> None:
        """[slots, n]"""
        if len(slots):
            self._put(self.drafts, (slots, slice(drafts.shape[-1])), drafts)

    def stash_lengths(self, slots: Any, lengths: Any, counts: Any) -> None:
        """What rows hold after a step, and how many accepted drafts are among that."""
        if len(slots):
            self._put(self.lengths, slots, lengths.reshape(-1))
            self._put(self.counts, slots, counts.reshape(-1))

    # ---- what the host notes ---------------------------------------------------------------

    def note_written(self, slots: np.ndarray) -> None:
        if self._unread is not None:
            self._unread.update(slots.tolist())

    def note_read(self, slots: np.ndarray) -> None:
        if self._unread is None:
            return
        for slot in slots[slots > 0].tolist():
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
