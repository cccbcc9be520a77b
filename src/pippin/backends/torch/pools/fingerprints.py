"""Fingerprints of what the prefix cache holds: steps add words up, the host compares.

One is taken of what a step captures or loads, and again of what a later one restores or spills: of
each cell, of each part of a state slot and of each hidden vector the sum of all words, as 64 bits.
So any word that has changed shows; words of one cell or part that have changed places do not.

All that a step sums is one launch at its end, and sums of what it makes stay on the device until
some are compared: what costs time is not the sums but the host's calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, count, pairwise
from typing import NamedTuple

import numpy as np
import torch

from pippin.backends.base import Damage, Restore
from pippin.backends.fingerprint_reads import FingerprintReads
from pippin.backends.torch.device import to_device
from pippin.backends.torch.pools.layout import KV_KINDS
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.payloads import HiddenPayload, KVPayload, StatePayload
from pippin.backends.torch.streams import Arrival, Streams
from pippin.types import Component, Payload

MOST_WORDS = 8 << 20  # that plain operations gather at a time
MOST_OF_A_STATE = 64 << 10  # words: several programs of a kernel add up a state
MOST_UNREAD = 16  # steps whose sums stay on the device
WORD_BYTES = 4
HIDDEN_LINES = np.zeros(1, np.int32)

# int64 [2, runs], on the device: addresses of words, and how many. Returns their sums, [runs].
SumWords = Callable[[torch.Tensor], torch.Tensor]
PRINTED = (KVPayload, StatePayload, HiddenPayload)
Compared = tuple[Payload, Callable[[], None]]  # what is called if it has changed
# Of a payload: words at first + line * stride, for each of its lines. Lines, stride, words, first.
Runs = tuple[np.ndarray, int, int, int]


class _Sums(NamedTuple):
    """On the device: of some payloads, one behind the other."""

    found: torch.Tensor
    counts: Sequence[int]  # of each payload
    made: Sequence[Payload]  # the last ones: they keep theirs


class TorchFingerprints(FingerprintReads):
    def __init__(self, pools: Pools, streams: Streams, sum_words: SumWords | None = None) -> None:
        """`sum_words`: a kernel for it, where there is one."""
        super().__init__()
        self._pools = pools
        self._streams = streams
        self._sum_words = sum_words
        self._unread: list[_Sums] = []
        self._cell_bytes = {kind: pools.layout.cell_bytes(kind) for kind in KV_KINDS}
        words = pools.layout.slab_bytes // WORD_BYTES
        parts = next(n for n in count(-(-words // MOST_OF_A_STATE)) if words % n == 0)
        self._state_parts = np.arange(parts)
        self._part_bytes = pools.layout.slab_bytes // parts

    def of_restored(self, slot: int, restore: Restore) -> Iterator[Compared]:
        for component, start, end, payload in restore.placed():
            yield payload, partial(self._note_restored, slot, component, start, end)

    def _note_restored(self, slot: int, component: Component, start: int, end: int) -> None:
        self.note(Damage(slot, component, start, end))

    def launch(self, step: int, compared: Sequence[Compared], made: Sequence[Payload]) -> None:
        """After all that this step does. `compared`: what earlier ones made, reported with this
        one's result; `made`: by this one."""
        payloads = [*(payload for payload, _ in compared), *made]
        self._unread.append(_Sums(*self._sum(payloads), made))
        if not compared and len(self._unread) < MOST_UNREAD:
            return
        unread, self._unread = self._unread, []
        arrival = self._streams.bring([torch.cat([sums.found for sums in unread])])
        # Whether or not this step is discarded, earlier ones have made theirs.
        self.add(None, step if compared else step + 1, partial(_keep, arrival, unread))
        if compared:
            self.add(step, step, partial(_compare, arrival, unread[-1], compared))

    def _sum(self, payloads: Sequence[Payload]) -> tuple[torch.Tensor, Sequence[int]]:
        """int64, on their way; and how many each payload has."""
        if self._sum_words is None:
            found = [self._sum_plainly(payload) for payload in payloads]
            return torch.cat(found), list(map(len, found))
        start = self._pools.memory.data_ptr()
        lines, *numbers = zip(*[self._runs(payload, start) for payload in payloads], strict=True)
        counts = list(map(len, lines))
        runs = np.repeat(np.array(numbers), counts, axis=1)
        runs[0] *= np.concatenate(lines)
        runs[0] += runs[2]
        return self._sum_words(to_device(runs[:2], self._pools.device)), counts

    def _runs(self, payload: Payload, start: int) -> Runs:
        """`start`: of the memory."""
        if isinstance(payload, KVPayload):
            nbytes = self._cell_bytes[payload.kind]
            return payload.cells, nbytes, nbytes // WORD_BYTES, start
        if isinstance(payload, StatePayload):
            nbytes = self._part_bytes
            first = start + payload.slab * self._pools.layout.slab_bytes
            return self._state_parts, nbytes, nbytes // WORD_BYTES, first
        assert isinstance(payload, HiddenPayload)
        assert payload.hidden is not None
        num_words, rest = divmod(payload.hidden.nbytes, WORD_BYTES)
        assert not rest
        return HIDDEN_LINES, 0, num_words, payload.hidden.data_ptr()

    def _sum_plainly(self, payload: Payload) -> torch.Tensor:
        if isinstance(payload, KVPayload):
            num_words = self._cell_bytes[payload.kind] // WORD_BYTES
            words = self._pools.memory.view(torch.int32).view(-1, num_words)
            cells = payload.cells
            size = max(MOST_WORDS // num_words, 1)
            some = [cells[i : i + size] for i in range(0, len(cells), size)]
            return torch.cat([words[self._pools.index(part)].sum(dim=1) for part in some])
        if isinstance(payload, StatePayload):
            state = self._pools.state_bytes(payload.slab).view(torch.int32)
            return state.view(len(self._state_parts), -1).sum(dim=1)
        assert isinstance(payload, HiddenPayload)
        assert payload.hidden is not None
        content = payload.hidden.view(torch.uint8)
        even = len(content) % WORD_BYTES == 0
        return content.view(torch.int32 if even else torch.uint8).sum().view(1)


def _keep(arrival: Arrival, unread: Sequence[_Sums]) -> None:
    (sums,) = arrival.wait()
    found = sums.numpy().copy()  # once: each payload keeps a part of it
    end = 0
    for _, counts, made in unread:
        end += sum(counts[: len(counts) - len(made)])
        for payload, num in zip(made, counts[len(counts) - len(made) :], strict=True):
            assert isinstance(payload, PRINTED)
            payload.keep_prints(found[end : end + num])
            end += num


def _compare(arrival: Arrival, last: _Sums, compared: Sequence[Compared]) -> None:
    (sums,) = arrival.wait()
    found = sums.numpy()[-len(last.found) :]
    places = pairwise(accumulate(last.counts, initial=0))
    for (payload, on_change), (start, end) in zip(compared, places, strict=False):
        assert isinstance(payload, PRINTED)
        kept = payload.prints
        if kept is not None and kept.tobytes() != found[start:end].tobytes():
            on_change()
