"""What the prefix cache keeps for MLX: immutable arrays, in blocks of at most GRID tokens.

Arrays are values, so a payload is a reference. Splitting is arithmetic on the host: it touches no
array. The part of a block that was split off keeps its block alive; blocks are small, so that
costs at most 63 tokens.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import mlx.core as mx
import numpy as np

from pippin.backends.step.fingerprints import Fingerprints, Prints, Summed
from pippin.backends.step.pending import Arrival
from pippin.types import Payload

Owner = TypeVar("Owner", "Block", "StatePayload")


@dataclass(eq=False)
class Block:
    """KV of up to GRID tokens, layers of one shape stacked: [layers, heads, tokens, dim] each."""

    arrays: tuple[mx.array, ...]
    num_tokens: int
    prints: Prints = field(default_factory=Prints)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass(frozen=True)
class Span:
    """Tokens [start, stop) of one block."""

    block: Block
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    def arrays(self) -> tuple[mx.array, ...]:
        if self.num_tokens == self.block.num_tokens:
            return self.block.arrays
        return tuple(array[:, :, self.start : self.stop] for array in self.block.arrays)


class LiveBuffers:
    """Counts the arrays of payloads that are still referenced: mlx does not say how many it has."""

    def __init__(self) -> None:
        self.num_live = 0

    def counted(self, owner: Owner) -> Owner:
        num_arrays = len(owner.arrays)
        self.num_live += num_arrays
        weakref.finalize(owner, self._forget, num_arrays).atexit = False
        return owner

    def _forget(self, num_arrays: int) -> None:
        self.num_live -= num_arrays


class KVPayload:
    """KV of consecutive tokens for every layer of one component."""

    def __init__(self, spans: tuple[Span, ...]) -> None:
        self.spans = spans
        self.num_tokens = sum(span.num_tokens for span in spans)
        self.nbytes = sum(s.block.nbytes * s.num_tokens // s.block.num_tokens for s in spans)

    def split(self, at: int) -> tuple[Payload, Payload]:
        head: list[Span] = []
        tail: list[Span] = []
        left = at
        for span in self.spans:
            cut = min(max(left, 0), span.num_tokens)
            if cut:
                head.append(Span(span.block, span.start, span.start + cut))
            if cut < span.num_tokens:
                tail.append(Span(span.block, span.start + cut, span.stop))
            left -= cut
        return KVPayload(tuple(head)), KVPayload(tuple(tail))

    def release(self) -> None:
        self.spans = ()  # the arrays are freed with their last reference

    def fingerprint(self) -> int:
        return _crc(array for span in self.spans for array in span.arrays())


class StatePayload:
    """What belongs to one position: of every recurrent layer its entries, layer by layer, [1, ...];
    or what the head read there, [1, 1, hidden]."""

    num_tokens = 1

    def __init__(self, arrays: tuple[mx.array, ...]) -> None:
        self.arrays = arrays
        self.nbytes = sum(array.nbytes for array in arrays)
        self.prints = Prints()

    def split(self, at: int) -> tuple[Payload, Payload]:
        raise TypeError(f"a state or hidden vector has one position: no split at {at}")

    def release(self) -> None:
        self.arrays = ()

    def fingerprint(self) -> int:
        return _crc(self.arrays)


def spans_of(payload: Payload) -> tuple[Span, ...]:
    assert isinstance(payload, KVPayload)
    return payload.spans


def _crc(arrays: Iterable[mx.array]) -> int:
    digest = 0
    for array in arrays:
        digest = zlib.crc32(np.asarray(mx.contiguous(array).view(mx.uint8)).tobytes(), digest)
    return digest


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
