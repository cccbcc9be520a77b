"""A piece of memory that is filled from its beginning, and the entries that lie in it.

    [ entry | entry | gap | entry | gap | entry | room ]
                                                end

An entry lies in one piece. Gaps are where entries were; `moves` says how the others close them.
Knows no threads: the caller has a lock.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from pippin.cache.entries import blocks
from pippin.cache.entries.entry import Bytes, Entry, Key

ALIGNMENT = 256


@dataclass(eq=False)
class Kept:
    entry: Entry
    area: Area
    at: int
    use: int  # the store's clock at the last use
    digests: list[int] = field(default_factory=list)  # of each block

    @property
    def nbytes(self) -> int:
        return aligned(self.entry.nbytes)


@dataclass(eq=False)
class Area:
    memory: Bytes
    kept: dict[Key, Kept] = field(default_factory=dict)  # in the order of their places
    end: int = 0
    num_readers: int = 0
    moving: bool = False  # entries close gaps: no read may start here

    @property
    def size(self) -> int:
        return self.memory.nbytes

    @property
    def kept_bytes(self) -> int:
        return sum(kept.nbytes for kept in self.kept.values())

    @property
    def last_use(self) -> float:
        """On average."""
        return sum(kept.use for kept in self.kept.values()) / max(len(self.kept), 1)

    def has_room(self, nbytes: int) -> bool:
        return self.end + nbytes <= self.size

    def has_gaps(self, nbytes: int) -> bool:
        """Whether `nbytes` fit once gaps are closed."""
        return self.kept_bytes + aligned(nbytes) <= self.size

    def blocks(self, kept: Kept) -> list[Bytes]:
        """The bytes of an entry, in blocks as `entries.blocks.divided` makes them."""
        end, size = kept.at + kept.entry.nbytes, blocks.BLOCK_BYTES
        return [self.memory[at : min(at + size, end)] for at in range(kept.at, end, size)]

    def arrays(self, kept: Kept) -> tuple[Bytes, ...]:
        """Of the whole entry."""
        ends = itertools.accumulate((spec.nbytes for spec in kept.entry.arrays), initial=kept.at)
        return tuple(self.memory[at:end] for at, end in itertools.pairwise(ends))

    def add(self, kept: Kept) -> None:
        assert kept.at == self.end
        self.kept[kept.entry.key] = kept
        self.end += kept.nbytes

    def unused_longest(self) -> list[Kept]:
        """Those used no later than the average: at least one, where there are any."""
        average = self.last_use
        return [kept for kept in self.kept.values() if kept.use <= average]

    def moves(self) -> list[tuple[Kept, int]]:
        """The new place of each entry, in an order in which none overwrites another."""
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


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
