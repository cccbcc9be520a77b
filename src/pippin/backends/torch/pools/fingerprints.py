"""Fingerprints of what the tree holds: steps add words up, the host compares. Waits for nobody.

One is taken of what a step captures or loads, and again of what a later one restores or spills: of
each cell, of each state slot and of each hidden vector the sum of all words, as 64 bits. So any
word that has changed shows; words of one cell or slot that have changed places do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from pippin.backends.base import Damage, Restore
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.payloads import HiddenPayload, KVPayload, StatePayload
from pippin.backends.torch.streams import Arrival, Streams
from pippin.types import Payload

MOST_BYTES = 32 << 20  # that are gathered at a time

Reader = Callable[[np.ndarray], None]  # of a payload's prints: int64, one for each token


@dataclass
class Launched:
    step: int
    due: int  # the step with whose result it is read: the device is done with it by then
    arrival: Arrival
    readers: list[tuple[int, Reader]] = field(default_factory=list)  # how many each, in order

    def read(self) -> None:
        (sums,) = self.arrival.wait()
        found, first = sums.numpy(), 0
        for count, reader in self.readers:
            reader(found[first : first + count].copy())
            first += count


class Fingerprints:
    """Of a step what it makes is read with the next one's result: nobody waits for it."""

    def __init__(self, pools: Pools, streams: Streams) -> None:
        self._pools = pools
        self._streams = streams
        self._launched: list[Launched] = []
        self._damaged: list[Damage] = []

    def take(self, step: int, payloads: Sequence[Payload]) -> None:
        """Of what this step has made, after all that it does."""
        self._sum(step, step + 1, [(payload, _keeper(payload)) for payload in payloads])

    def compare(
        self, step: int, payloads: Sequence[Payload], on_change: Callable[[], None]
    ) -> None:
        """What an earlier step made; told with this one's result."""
        self._sum(step, step, [(payload, _comparer(payload, on_change)) for payload in payloads])

    def compare_restored(self, step: int, slot: int, restore: Restore) -> None:
        asked: list[tuple[Payload, Reader]] = []
        for component, start, end, payload in restore.placed():
            note = partial(self._note, Damage(slot, component, start, end))
            asked.append((payload, _comparer(payload, note)))
        self._sum(step, step, asked)

    def forget(self, step: int) -> None:
        """Nobody will take this step in."""
        self._launched = [found for found in self._launched if found.step != step]

    def read(self, step: int) -> tuple[Damage, ...]:
        """What is known when a step has been waited for."""
        due = [found for found in self._launched if found.due <= step]
        self._launched = [found for found in self._launched if found.due > step]
        for found in sorted(due, key=lambda found: found.due):
            found.read()
        damaged, self._damaged = tuple(self._damaged), []
        return damaged

    def _note(self, damage: Damage) -> None:
        self._damaged.append(damage)

    def _sum(self, step: int, due: int, asked: Sequence[tuple[Payload, Reader]]) -> None:
        if asked:
            sums = torch.cat([part for payload, _ in asked for part in self._sums(payload)])
            readers = [(payload.num_tokens, reader) for payload, reader in asked]
            self._launched.append(Launched(step, due, self._streams.bring([sums]), readers))

    def _sums(self, payload: Payload) -> Iterator[torch.Tensor]:
        """int64 [tokens], in pieces."""
        if isinstance(payload, KVPayload):
            cells = payload.cells
            size = max(MOST_BYTES * payload.num_tokens // payload.nbytes, 1)
            for first in range(0, len(cells), size):
                content = self._pools.cell_bytes(payload.kind, cells[first : first + size])
                yield content.view(torch.int32).sum(dim=1)
            return
        if isinstance(payload, StatePayload):
            content = self._pools.state_bytes(payload.slab)
        else:
            assert isinstance(payload, HiddenPayload)
            assert payload.hidden is not None
            content = payload.hidden.contiguous().view(torch.uint8)
        words = torch.int32 if content.nbytes % 4 == 0 else torch.uint8
        yield content.view(words).sum().view(1)


def _keeper(payload: Payload) -> Reader:
    def keep(found: np.ndarray) -> None:
        assert isinstance(payload, KVPayload | StatePayload | HiddenPayload)
        payload.keep_prints(found)

    return keep


def _comparer(payload: Payload, on_change: Callable[[], None]) -> Reader:
    def compare(found: np.ndarray) -> None:
        assert isinstance(payload, KVPayload | StatePayload | HiddenPayload)
        kept = payload.prints
        if kept is not None and not np.array_equal(kept, found):
            on_change()

    return compare
