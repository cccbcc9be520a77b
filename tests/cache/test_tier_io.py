"""Memory that pieces are read to: there before a load wants it, and used again."""

from __future__ import annotations

import numpy as np

from pippin.cache.entries import Bytes
from pippin.cache.tiers.tier_io import PIECES_AHEAD, Buffers


class Memory:
    def __init__(self) -> None:
        self.given: list[int] = []

    def allocate(self, nbytes: int) -> Bytes:
        self.given.append(nbytes)
        return np.empty(nbytes, dtype=np.uint8)


def test_a_load_finds_its_memory_ready() -> None:
    memory = Memory()
    buffers = Buffers(memory.allocate, 100)
    assert memory.given == [100] * PIECES_AHEAD
    for nbytes in (100, 1, 60):
        taken = [buffers.claim(nbytes) for _ in range(PIECES_AHEAD)]
        assert len({id(buffer) for buffer in taken}) == PIECES_AHEAD
        for buffer in taken:
            buffers.release(buffer)
    assert memory.given == [100] * PIECES_AHEAD


def test_the_largest_buffers_are_kept() -> None:
    memory = Memory()
    buffers = Buffers(memory.allocate, 100)
    taken = [buffers.claim(300), *(buffers.claim(100) for _ in range(PIECES_AHEAD))]
    for buffer in taken:
        buffers.release(buffer)
    before = len(memory.given)
    assert buffers.claim(300).nbytes == 300
    assert len(memory.given) == before
