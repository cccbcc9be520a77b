"""Fingerprints of blocks and states: of each array the sum of all words, modulo 2**32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx

from pippin.backends.mlx.payloads.payload import Block, StatePayload, spans_of
from pippin.backends.step.fingerprints import Fingerprints, Summed
from pippin.backends.step.pending import Arrival
from pippin.types import Payload

Printed = Block | StatePayload


class MLXFingerprints(Fingerprints[Printed]):
    def _owners(self, payload: Payload) -> Iterable[Printed]:
        """Whole blocks, also where a payload has a part of one."""
        if isinstance(payload, StatePayload):
            return [payload]
        return [span.block for span in spans_of(payload)]


def sum_words(owners: Sequence[Printed], bring: Callable[[Sequence[mx.array]], Arrival]) -> Summed:
    sums = mx.stack([mx.sum(_words(array)) for owner in owners for array in owner.arrays])
    arrival = bring([sums])
    return Summed(lambda: arrival.wait()[0], [len(owner.arrays) for owner in owners])


def _words(array: mx.array) -> mx.array:
    """uint32, unless rows are too short for that."""
    row_bytes = array.shape[-1] * array.itemsize
    if row_bytes % 4 == 0:
        return array.view(mx.uint32)
    return array.view(mx.uint16 if row_bytes % 2 == 0 else mx.uint8).astype(mx.uint32)
