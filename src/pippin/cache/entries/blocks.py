"""Payloads as blocks, which threads read, copy and verify in parallel. Knows no files.

    arrays   [  0  |   1   |            2            ]
    blocks   [ 2 MB  | 2 MB  | 2 MB  | 2 MB  | rest  ]     of the bytes, wherever an array ends

A block that was just read is hashed while a core's own cache still has it: memory is read once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, TypeVar

import numpy as np
import xxhash

from pippin.cache.entries.entry import Bytes

BLOCK_BYTES = 2 << 20  # of the format on disk: readers divide as the writer did
ALONE_BYTES = 1 << 20  # less than this is done by the caller alone

Part = TypeVar("Part")
Result = TypeVar("Result")


class Block(NamedTuple):
    at: int  # bytes of the payload before it
    parts: list[memoryview]  # its own

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def digest(self) -> bytes:
        """Large parts are hashed without Python's lock."""
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


def views(parts: Sequence[Bytes | bytes]) -> list[memoryview]:
    """The memory of those that are not empty."""
    found = [part.data if isinstance(part, np.ndarray) else memoryview(part) for part in parts]
    return [view.cast("B") for view in found if view.nbytes]


class Workers:
    """A few threads, and the caller's own, that share what is to be done."""

    def __init__(self, name: str, max_threads: int) -> None:
        self._num_threads = min(max_threads, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix=name)

    def map(
        self, work: Callable[[Part], Result], parts: Sequence[Part], nbytes: int
    ) -> list[Result]:
        """What `work` returns for each part, in order; none is running when this returns."""
        results: dict[int, Result] = {}
        left = list(enumerate(parts))[::-1]  # taken from the end, so in the order of the parts

        def run() -> None:
            while True:
                try:
                    number, part = left.pop()
                except IndexError:
                    return
                results[number] = work(part)

        helpers: list[Future[None]] = []
        if nbytes >= ALONE_BYTES:
            most = min(self._num_threads, len(parts))
            helpers = [self._pool.submit(run) for _ in range(most - 1)]
        try:
            run()
        finally:
            wait(helpers)
        for helper in helpers:
            helper.result()
        return [results[number] for number in range(len(parts))]

    def close(self) -> None:
        self._pool.shutdown()
