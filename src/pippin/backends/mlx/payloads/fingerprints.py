"""Fingerprints of what the prefix cache holds: steps add words up, the host compares.

Of each array all words are added up modulo 2**32, and a payload's sums are hashed in their order.
So any word that has changed shows; words of one array that have changed places do not.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx
import numpy as np

from pippin.backends.base import Damage, Restore
from pippin.backends.fingerprint_reads import FingerprintReads
from pippin.backends.mlx.payloads.payload import Block, StatePayload, spans_of
from pippin.types import Component, Payload

Printed = Block | StatePayload
Reader = Callable[[int], None]


@dataclass
class Sums:
    """What a step is asked to add up: an array each, and who reads those of each payload."""

    arrays: list[mx.array] = field(default_factory=list)
    readers: list[tuple[int, Reader]] = field(default_factory=list)  # how many each, in order

    def add(self, owner: Printed, reader: Reader) -> None:
        self.arrays += [mx.sum(_words(array)) for array in owner.arrays]
        self.readers.append((len(owner.arrays), reader))


class MLXFingerprints(FingerprintReads):
    def __init__(self) -> None:
        super().__init__()
        self._now = Sums()
        self._later = Sums()

    def begin(self) -> None:
        """Forget what a step asked for whose launch failed."""
        self._now, self._later = Sums(), Sums()

    def take(self, payload: Payload) -> None:
        """Of what this step makes."""
        for owner in _owners(payload):
            self._later.add(owner, _keeper(owner))

    def compare(self, payload: Payload, on_change: Callable[[], None]) -> None:
        """What an earlier step made; reported with this one's result."""
        for owner in _owners(payload):
            self._now.add(owner, _comparer(owner, on_change))

    def compare_restored(
        self, slot: int, restore: Restore, components: Collection[Component], *, later: bool
    ) -> None:
        """`later`: nothing is computed from it before the next step."""
        for component, start, end, payload in restore.placed():
            if component in components:
                note = partial(self.note, Damage(slot, component, start, end))
                for owner in _owners(payload):
                    (self._later if later else self._now).add(owner, _comparer(owner, note))

    def launch(self, step: int) -> list[mx.array]:
        """What the device is to compute, for the step's next `mx.async_eval`."""
        launched = []
        for due, sums in ((step, self._now), (step + 1, self._later)):
            if sums.arrays:
                launched.append(mx.stack(sums.arrays))
                self.add(step, due, partial(_read, launched[-1], sums.readers))
        self._now, self._later = Sums(), Sums()
        return launched


def _read(sums: mx.array, readers: Sequence[tuple[int, Reader]]) -> None:
    """`readers`: with how many sums, uint32, each, in order."""
    found = iter(np.asarray(sums).tolist())
    for count, reader in readers:
        reader(hash(tuple(next(found) for _ in range(count))))


def _keeper(owner: Printed) -> Reader:
    """Holds nothing: what was evicted by then has given its memory back."""
    known = weakref.ref(owner)

    def keep(found: int) -> None:
        if (alive := known()) is not None:
            alive.print = found

    return keep


def _comparer(owner: Printed, on_change: Callable[[], None]) -> Reader:
    def compare(found: int) -> None:
        if owner.print is not None and owner.print != found:
            on_change()

    return compare


def _owners(payload: Payload) -> Iterator[Printed]:
    """What has a fingerprint: whole blocks, also where a payload has a part of one."""
    if isinstance(payload, StatePayload):
        yield payload
        return
    for span in spans_of(payload):
        yield span.block


def _words(array: mx.array) -> mx.array:
    """uint32, unless rows are too short for that."""
    row_bytes = array.shape[-1] * array.itemsize
    if row_bytes % 4 == 0:
        return array.view(mx.uint32)
    return array.view(mx.uint16 if row_bytes % 2 == 0 else mx.uint8).astype(mx.uint32)
