"""A piece of memory that is filled from its beginning, and the entries that lie in it.

    [ entry | entry | gap | entry | gap | entry | room ]
                                                end

An entry lies in one piece. Gaps are where entries were; `moves` says how the others close them.
Knows no threads: whoever calls has a lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pippin.cache.entries.entry import Bytes, Entry, Key

ALIGNMENT = 256
BLOCK_BYTES = 4 << 20  # that have a digest: several threads copy and verify one entry


@dataclass(eq=False)
class Kept:
    entry: Entry
    at: int
    digests: list[int]  # of each block
    used: int  # when, by a count of uses

    @property
    def nbytes(self) -> int:
        return aligned(self.entry.nbytes)


class Block(NamedTuple):
    """Bytes [start, stop) of one of an entry's arrays."""

    array: int
    start: int
    stop: int
    at: int  # in the entry


@dataclass(eq=False)
class Area:
    memory: Bytes
    kept: dict[Key, Kept] = field(default_factory=dict)  # in the order of their places
    end: int = 0
    num_readers: int = 0
    moving: bool = False  # entries close gaps: nobody may read here

    @property
    def size(self) -> int:
        return self.memory.nbytes

    @property
    def kept_bytes(self) -> int:
        return sum(kept.nbytes for kept in self.kept.values())

    @property
    def last_use(self) -> float:
        """On average."""
        return sum(kept.used for kept in self.kept.values()) / max(len(self.kept), 1)

    def has_room(self, nbytes: int) -> bool:
        return self.end + nbytes <= self.size

    def has_gaps(self, nbytes: int) -> bool:
        """Whether there is room for so much once gaps are closed."""
        return self.kept_bytes + aligned(nbytes) <= self.size

    def view(self, kept: Kept, block: Block) -> Bytes:
        first = kept.at + block.at
        return self.memory[first : first + block.stop - block.start]

    def arrays(self, kept: Kept) -> list[Bytes]:
        """Of the whole entry."""
        found: list[Bytes] = []
        at = kept.at
        for spec in kept.entry.arrays:
            found.append(self.memory[at : at + spec.nbytes])
            at += spec.nbytes
        return found

    def add(self, kept: Kept) -> None:
        assert kept.at == self.end
        self.kept[kept.entry.key] = kept
        self.end += kept.nbytes

    def unused_longest(self) -> list[Key]:
        """Those used no later than the average: at least one, where there are any."""
        average = self.last_use
        return [key for key, kept in self.kept.items() if kept.used <= average]

    def moves(self) -> list[tuple[Kept, int]]:
        """To which places the entries go, in an order in which none is in another's way."""
        found: list[tuple[Kept, int]] = []
        end = 0
        for kept in self.kept.values():
            found.append((kept, end))
            end += kept.nbytes
        return found

    def move(self, kept: Kept, at: int) -> None:
        """Bytes alone; its place is noted by `note_moves`."""
        if at != kept.at:
            nbytes = kept.entry.nbytes
            self.memory[at : at + nbytes] = self.memory[kept.at : kept.at + nbytes]

    def note_moves(self, moves: list[tuple[Kept, int]]) -> None:
        self.end = 0
        for kept, at in moves:
            kept.at = at
            self.end = at + kept.nbytes


def blocks(entry: Entry) -> Iterator[Block]:
    at = 0
    for array, spec in enumerate(entry.arrays):
        for start in range(0, spec.nbytes, BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, spec.nbytes)
            yield Block(array, start, stop, at + start)
        at += spec.nbytes


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
