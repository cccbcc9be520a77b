"""Fingerprints of what the prefix cache holds: steps add words up, the host compares.

One is taken of what a step captures or loads, and again of what a later one restores or spills: of
each cell, of each state slot and of each hidden vector the sum of all words, as 64 bits. So any
word that has changed shows; words of one cell or slot that have changed places do not.

All that a step sums is launched at its end, together: a launch of its own for each payload would
take the host longer than the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from pippin.backends.base import Damage, Restore
from pippin.backends.fingerprint_reads import FingerprintReads
from pippin.backends.torch.pools.layout import KV_KINDS
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.payloads import HiddenPayload, KVPayload, StatePayload
from pippin.backends.torch.streams import Arrival, Streams
from pippin.types import Payload

MOST_WORDS = 8 << 20  # that are gathered at a time
LONG_RUN = 64 << 10  # words that are worth a launch of their own
ALIGNED = 2  # starts, of 8 bytes: a kernel is compiled again for what begins elsewhere

# Of int32 memory, the words from each start (int64, on the device) on: int64, one for each.
SumWords = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
PRINTED = (KVPayload, StatePayload, HiddenPayload)
Compared = tuple[Payload, Callable[[], None]]  # what is called if it has changed


class TorchFingerprints(FingerprintReads):
    def __init__(self, pools: Pools, streams: Streams, sum_words: SumWords | None = None) -> None:
        """`sum_words`: a kernel for it, where there is one."""
        super().__init__()
        self._pools = pools
        self._streams = streams
        self._sum_words = sum_words
        self._cell_words = {kind: pools.layout.cell_bytes(kind) // 4 for kind in KV_KINDS}

    def of_restored(self, slot: int, restore: Restore) -> Iterator[Compared]:
        for component, start, end, payload in restore.placed():
            yield payload, partial(self.note, Damage(slot, component, start, end))

    def launch(self, step: int, compared: Sequence[Compared], made: Sequence[Payload]) -> None:
        """After all that this step does. `compared`: what earlier ones made, reported with this
        one's result; `made`: by this one, read with the next one's."""
        payloads = [*(payload for payload, _ in compared), *made]
        if not payloads:
            return
        arrival, places = self._sum(payloads)
        if compared:
            self.add(step, step, partial(_compare, arrival, places[: len(compared)], compared))
        if made:
            self.add(step, step + 1, partial(_keep, arrival, places[len(compared) :], made))

    def _sum(self, payloads: Sequence[Payload]) -> tuple[Arrival, list[slice]]:
        """Sums on their way, and where among them each payload's are."""
        places = [slice(0)] * len(payloads)
        runs: dict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)  # by words of each
        hidden: list[int] = []
        for number, payload in enumerate(payloads):
            if isinstance(payload, HiddenPayload):
                hidden.append(number)
            else:
                lines, num_words = self._lines(payload)
                runs[num_words].append((number, lines))
        end, groups = 0, dict[int, np.ndarray]()
        for num_words, parts in runs.items():
            for number, lines in parts:
                places[number] = slice(end, end + len(lines))
                end += len(lines)
            padding = [lines[-1:]] * (end % ALIGNED)
            end += len(padding)
            every = np.concatenate([*(lines for _, lines in parts), *padding])
            groups[num_words] = every.astype(np.int64) * num_words
        sums = self._sum_runs(groups)
        if hidden:
            sums.append(_sum_hidden([payloads[number] for number in hidden]))
            for place, number in enumerate(hidden, start=end):
                places[number] = slice(place, place + 1)
        return self._streams.bring([torch.cat(sums) if len(sums) > 1 else sums[0]]), places

    def _lines(self, payload: Payload) -> tuple[np.ndarray, int]:
        """Which lines of memory a payload has, and how many words each."""
        if isinstance(payload, KVPayload):
            return payload.cells, self._cell_words[payload.kind]
        assert isinstance(payload, StatePayload)
        return np.array([payload.slab]), self._pools.layout.slab_bytes // 4

    def _sum_runs(self, groups: Mapping[int, np.ndarray]) -> list[torch.Tensor]:
        """int64, in pieces. `groups`: starts, by how many words from each on."""
        memory = self._pools.memory.view(torch.int32)
        if self._sum_words is None:
            return [p for n, starts in groups.items() for p in self._gather(memory, starts, n)]
        if not groups:
            return []
        every = self._pools.index(np.concatenate([*groups.values()]))
        parts = every.split([len(starts) for starts in groups.values()])
        return [self._sum_words(memory, part, n) for part, n in zip(parts, groups, strict=True)]

    def _gather(
        self, memory: torch.Tensor, starts: np.ndarray, num_words: int
    ) -> Iterator[torch.Tensor]:
        """By plain operations."""
        if num_words >= LONG_RUN:
            yield from (memory[start : start + num_words].sum().view(1) for start in starts)
            return
        lines, size = memory.view(-1, num_words), max(MOST_WORDS // num_words, 1)
        for i in range(0, len(starts), size):
            yield lines[self._pools.index(starts[i : i + size] // num_words)].sum(dim=1)


def _sum_hidden(payloads: Sequence[Payload]) -> torch.Tensor:
    vectors = [p.hidden for p in payloads if isinstance(p, HiddenPayload) and p.hidden is not None]
    assert len(vectors) == len(payloads)
    content = torch.stack(vectors).view(torch.uint8)
    words = torch.int32 if content.shape[1] % 4 == 0 else torch.uint8
    return content.view(words).sum(dim=1)


def _keep(arrival: Arrival, places: Sequence[slice], made: Sequence[Payload]) -> None:
    (sums,) = arrival.wait()
    found = sums.numpy().copy()  # once: each payload keeps a part of it
    for place, payload in zip(places, made, strict=True):
        assert isinstance(payload, PRINTED)
        payload.keep_prints(found[place])


def _compare(arrival: Arrival, places: Sequence[slice], compared: Sequence[Compared]) -> None:
    (sums,) = arrival.wait()
    found = sums.numpy()
    for place, (payload, on_change) in zip(places, compared, strict=True):
        assert isinstance(payload, PRINTED)
        kept = payload.prints
        if kept is not None and kept.tobytes() != found[place].tobytes():
            on_change()
