"""How much captured graphs have room for: widths of decode steps, rooms of prompts' chunks, and
both, of decode rows beside chunks in one forward.

A few sizes each, so that there are few graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pippin.backends.base import PrefillRow
from pippin.backends.chunking import cut_chunk
from pippin.types import GRID

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ROOM_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
ROOM_ROWS = (4, 16)
MOST_TOKENS = ROOM_TOKENS[-1]


def width_for(num_rows: int) -> int:
    return next((width for width in WIDTHS if width >= num_rows), -(-num_rows // 64) * 64)


@dataclass(frozen=True)
class Room:
    num_tokens: int
    num_rows: int

    @property
    def least_rows(self) -> int:
        """That do not fit into a smaller one."""
        return 1 + max((rows for rows in ROOM_ROWS if rows < self.num_rows), default=0)

    @property
    def num_blocks(self) -> int:
        """Of GRID tokens or less, each of one row: as many as there can be, in fours.

        So every line of a graph's inputs begins where kernels load best.
        """
        most = (self.num_tokens + (GRID - 1) * self.num_rows) // GRID
        return -(-most // 4) * 4


ROOMS = tuple(Room(num_tokens, num_rows) for num_rows in ROOM_ROWS for num_tokens in ROOM_TOKENS)


def room_for(num_tokens: int, num_rows: int) -> Room | None:
    """The smallest one; None: there is none."""
    fits = (r for r in ROOMS if r.num_tokens >= num_tokens and r.num_rows >= num_rows)
    return next(fits, None)


class MixedSize(NamedTuple):
    width: int  # decode rows
    room: Room


MIXED_WIDTHS = (16, 32, 64, 128, 256)
# Longer chunks are bound by their tokens: a forward of their own costs little more.
MIXED_ROOMS = tuple(Room(num_tokens, ROOM_ROWS[-1]) for num_tokens in (64, 128, 256, 512, 1024))


def mixed_size_for(num_decodes: int, num_tokens: int, num_rows: int) -> MixedSize | None:
    """The smallest one; None: there is none."""
    width = next((width for width in MIXED_WIDTHS if width >= num_decodes), None)
    fits = (r for r in MIXED_ROOMS if r.num_tokens >= num_tokens and r.num_rows >= num_rows)
    room = next(fits, None)
    return None if width is None or room is None else MixedSize(width, room)


def group_by_room(chunks: Sequence[PrefillRow]) -> list[list[PrefillRow]]:
    """Chunks that share a forward: as many as a room takes. What none takes is cut."""
    groups: list[list[PrefillRow]] = []
    num_tokens = 0  # of the last group
    for chunk in chunks:
        for part in cut_chunk(chunk, range(chunk.start + MOST_TOKENS, chunk.end, MOST_TOKENS)):
            length, follows = len(part.tokens), part.start > chunk.start
            full = not groups or room_for(num_tokens + length, len(groups[-1]) + 1) is None
            if full or follows:
                groups.append([])
                num_tokens = 0
            groups[-1].append(part)
            num_tokens += length
    return groups
