"""Fingerprints of what the prefix cache holds: steps add words up, the host compares.

One is taken of what a step captures or loads, and again of what a later one restores or spills: of
each cell, of each state slot and of each hidden vector the sum of all words, as 64 bits. So any
word that has changed shows; words of one cell or slot that have changed places do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import torch

from pippin.backends.base import Damage, Restore
from pippin.backends.fingerprint_reads import FingerprintReads
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.payloads import HiddenPayload, KVPayload, StatePayload
from pippin.backends.torch.streams import Arrival, Streams
from pippin.types import Payload

MOST_WORDS = 8 << 20  # that are gathered at a time
LONG_RUN = 64 << 10  # words that are worth a launch of their own

# Of int32 memory, the words from each start (int64, on the device) on: int64, one for each.
SumWords = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
Reader = Callable[[np.ndarray], None]  # of a payload's prints: int64, one for each token


class TorchFingerprints(FingerprintReads):
    def __init__(self, pools: Pools, streams: Streams, sum_words: SumWords | None = None) -> None:
        """`sum_words`: a kernel for it, where there is one."""
        super().__init__()
        self._pools = pools
        self._streams = streams
        self._sum_words = sum_words

    def take(self, step: int, payloads: Sequence[Payload]) -> None:
        """Of what this step has made, after all that it does."""
        self._sum(step, step + 1, [(payload, _keeper(payload)) for payload in payloads])

    def compare(
        self, step: int, payloads: Sequence[Payload], on_change: Callable[[], None]
    ) -> None:
        """What an earlier step made; reported with this one's result."""
        self._sum(step, step, [(payload, _comparer(payload, on_change)) for payload in payloads])

    def compare_restored(self, step: int, restored: Iterable[tuple[int, Restore]]) -> None:
        """By slot."""
        asked: list[tuple[Payload, Reader]] = []
        for slot, restore in restored:
            for component, start, end, payload in restore.placed():
                note = partial(self.note, Damage(slot, component, start, end))
                asked.append((payload, _comparer(payload, note)))
        self._sum(step, step, asked)

    def _sum(self, step: int, due: int, asked: Sequence[tuple[Payload, Reader]]) -> None:
        """Few launches, however many payloads there are: runs of one length go together."""
        if not asked:
            return
        runs: dict[int, list[np.ndarray]] = defaultdict(list)
        readers: dict[int, list[tuple[int, Reader]]] = defaultdict(list)
        sums: list[torch.Tensor] = []
        order: list[tuple[int, Reader]] = []
        for payload, reader in asked:
            if isinstance(payload, HiddenPayload):
                sums.append(_sum_hidden(payload))
                order.append((1, reader))
            else:
                starts, num_words = self._runs(payload)
                runs[num_words].append(starts)
                readers[num_words].append((len(starts), reader))
        for num_words, parts in runs.items():
            sums += self._sum_runs(np.concatenate(parts), num_words)
            order += readers[num_words]
        arrival = self._streams.bring([torch.cat(sums)])
        self.add(step, due, partial(_read, arrival, order))

    def _runs(self, payload: Payload) -> tuple[np.ndarray, int]:
        """Where a payload's words lie: int64 starts, and how many from each on."""
        layout = self._pools.layout
        if isinstance(payload, KVPayload):
            num_words = layout.cell_bytes(payload.kind) // 4
            return payload.cells.astype(np.int64) * num_words, num_words
        assert isinstance(payload, StatePayload)
        num_words = layout.slab_bytes // 4
        return np.array([payload.slab * num_words]), num_words

    def _sum_runs(self, starts: np.ndarray, num_words: int) -> list[torch.Tensor]:
        """int64, in pieces."""
        memory = self._pools.memory.view(torch.int32)
        if self._sum_words is not None:
            return [self._sum_words(memory, self._pools.index(starts), num_words)]
        if num_words >= LONG_RUN:
            return [memory[start : start + num_words].sum().view(1) for start in starts]
        lines, size = memory.view(-1, num_words), max(MOST_WORDS // num_words, 1)
        pieces = (starts[i : i + size] // num_words for i in range(0, len(starts), size))
        return [lines[self._pools.index(piece)].sum(dim=1) for piece in pieces]


def _read(arrival: Arrival, readers: Sequence[tuple[int, Reader]]) -> None:
    """`readers`: with how many sums each, in order."""
    (sums,) = arrival.wait()
    found, first = sums.numpy(), 0
    for count, reader in readers:
        reader(found[first : first + count].copy())
        first += count


def _sum_hidden(payload: HiddenPayload) -> torch.Tensor:
    assert payload.hidden is not None
    content = payload.hidden.contiguous().view(torch.uint8)
    words = torch.int32 if content.nbytes % 4 == 0 else torch.uint8
    return content.view(words).sum().view(1)


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
