"""What the disk's tree keeps: parts of entries. Knows their sizes, not where they are.

Splitting a part is arithmetic. An entry is read whole, and is wanted until its last part goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pippin.cache.disk.entries import Entry, Key
from pippin.cache.radix import Node
from pippin.types import Payload


class Span(NamedTuple):
    """Tokens [start, stop) of an entry's own; of a state or a hidden vector [0, 1)."""

    entry: Entry
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.num_tokens == num_parts(self.entry)


def num_parts(entry: Entry) -> int:
    """How many tokens its payload divides into."""
    return entry.key.num_tokens or 1


@dataclass(eq=False)
class Owned:
    """An entry that the tree names: by how many of its tokens, and where it ends."""

    entry: Entry
    on_unused: Callable[[Owned], None]
    num_live: int = 0
    node: Node | None = None
    unreadable: bool = False  # it did not read back as it was written

    @property
    def key(self) -> Key:
        return self.entry.key

    def part(self) -> EntryPart:
        """All of it, once."""
        assert not self.num_live
        self.num_live = num_parts(self.entry)
        return EntryPart(self, 0, self.num_live)


class EntryPart:
    """A payload of the disk's tree."""

    __slots__ = ("owner", "start", "stop")

    def __init__(self, owner: Owned, start: int, stop: int) -> None:
        self.owner = owner
        self.start = start
        self.stop = stop

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> Span:
        return Span(self.owner.entry, self.start, self.stop)

    @property
    def nbytes(self) -> int:
        """Such that those of all parts add up."""
        nbytes, total = self.owner.entry.nbytes, num_parts(self.owner.entry)
        return nbytes * self.stop // total - nbytes * self.start // total

    def split(self, at: int) -> tuple[Payload, Payload]:
        cut = self.start + at
        return EntryPart(self.owner, self.start, cut), EntryPart(self.owner, cut, self.stop)

    def release(self) -> None:
        owner = self.owner
        owner.num_live -= self.num_tokens
        assert owner.num_live >= 0, "a part was released twice"
        if not owner.num_live:
            owner.on_unused(owner)

    def fingerprint(self) -> int:
        """Its bytes are verified when they are read; this is what they are read by."""
        return hash((self.owner.key, self.start, self.stop))
