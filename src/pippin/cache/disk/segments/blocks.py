"""Payloads as blocks, which threads read and verify beside each other. Knows no files.

    arrays   [  0  |   1   |            2            ]
    blocks   [ 2 MB  | 2 MB  | 2 MB  | 2 MB  | rest  ]     of the bytes, wherever an array ends

A block that was just read is hashed while a core's own cache still holds it: memory is gone
through once. A payload's digest is one over the digests of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import xxhash

from pippin.cache.disk.files import views
from pippin.cache.entries.entry import Bytes

BLOCK_BYTES = 2 << 20  # of the format: whoever reads must divide as whoever wrote did


class Block(NamedTuple):
    at: int  # bytes of the payload before it
    parts: list[memoryview]  # its own

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def digest(self) -> bytes:
        """Without Python's lock where that is worth it."""
        digest = xxhash.xxh3_128()
        for part in self.parts:
            digest.update(part)
        return digest.digest()


def divided(data: Sequence[Bytes]) -> list[Block]:
    """The memory of a payload's arrays, block by block."""
    blocks: list[Block] = []
    at, filled = 0, BLOCK_BYTES
    for view in views(data):
        first = 0
        while first < len(view):
            if filled == BLOCK_BYTES:
                blocks.append(Block(at, []))
                filled = 0
            part = view[first : first + BLOCK_BYTES - filled]
            blocks[-1].parts.append(part)
            first += len(part)
            filled += len(part)
            at += len(part)
    return blocks


def digests_of(blocks: Iterable[Block]) -> list[bytes]:
    return [block.digest() for block in blocks]
