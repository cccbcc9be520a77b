"""Fingerprints of payloads: the sum of all words, as 64 bits, of each cell, of each part of a state
slot and of each hidden vector.

All that a step sums is one launch at its end, or two: what costs time is not the sums but the
host's calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count

import numpy as np
import torch

from pippin.backends.step.fingerprints import Fingerprints, Summed
from pippin.backends.torch.device import to_device
from pippin.backends.torch.pools.layout import KV_KINDS
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.payloads import HiddenPayload, KVPayload, StatePayload
from pippin.backends.torch.streams import Streams
from pippin.types import Payload

MOST_WORDS = 8 << 20  # that plain operations gather at a time
MOST_OF_A_STATE = 64 << 10  # words: several programs of a kernel add up a state
WORD_BYTES = 4
HIDDEN_LINES = np.zeros(1, np.int32)

# int64 [2, runs], on the device: addresses of words, and how many. Returns their sums, [runs].
SumWords = Callable[[torch.Tensor], torch.Tensor]
Printed = KVPayload | StatePayload | HiddenPayload
# Of a payload: words at first + line * stride, for each of its lines. Lines, stride, words, first.
Runs = tuple[np.ndarray, int, int, int]


class TorchFingerprints(Fingerprints[Printed]):
    def __init__(self, sum_up: WordSums) -> None:
        super().__init__()
        self.sum_up = sum_up

    def _owners(self, payload: Payload) -> Iterable[Printed]:
        assert isinstance(payload, Printed)
        return [payload]


class WordSums:
    """Adds up words of payloads, after all that a step does."""

    def __init__(self, pools: Pools, streams: Streams, sum_words: SumWords | None = None) -> None:
        """`sum_words`: a kernel for it, where there is one."""
        self._pools = pools
        self._streams = streams
        self._sum_words = sum_words
        self._cell_bytes = {kind: pools.layout.cell_bytes(kind) for kind in KV_KINDS}
        words = pools.layout.slab_bytes // WORD_BYTES
        parts = next(n for n in count(-(-words // MOST_OF_A_STATE)) if words % n == 0)
        self._state_parts = np.arange(parts)
        self._part_bytes = pools.layout.slab_bytes // parts

    def __call__(self, payloads: Sequence[Printed]) -> Summed:
        sums, counts = self._sum(payloads)
        arrival = self._streams.bring([sums])
        return Summed(lambda: arrival.wait()[0].numpy(), counts)

    def _sum(self, payloads: Sequence[Printed]) -> tuple[torch.Tensor, Sequence[int]]:
        """int64; and how many each payload has."""
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

    def _runs(self, payload: Printed, start: int) -> Runs:
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

    def _sum_plainly(self, payload: Printed) -> torch.Tensor:
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
