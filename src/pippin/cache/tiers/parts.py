"""The payloads of a tier's tree: parts of entries. Knows their sizes, not where they are.

Splitting a part is arithmetic. An entry is read whole, and is kept until its last part is released.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from pippin.cache.entries.entry import Entry, Key
from pippin.cache.tree.radix import Node
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
    """An entry that the tree names, and the parts by which it does: each knows its node."""

    entry: Entry
    on_unused: Callable[[Owned], None]
    parts: dict[EntryPart, None] = field(default_factory=dict)  # a set, in a fixed order
    unreadable: bool = False  # it did not read back as it was written

    @property
    def key(self) -> Key:
        return self.entry.key

    def part(self) -> EntryPart:
        """All of it, for an insert."""
        return EntryPart(self, 0, num_parts(self.entry))


class EntryPart:
    """A payload of the disk's tree."""

    __slots__ = ("node", "owner", "start", "stop")

    def __init__(self, owner: Owned, start: int, stop: int) -> None:
        self.owner = owner
        self.start = start
        self.stop = stop
        self.node: Node | None = None  # that has it; None: an insert has yet to place it
        owner.parts[self] = None

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
        del self.owner.parts[self]
        return EntryPart(self.owner, self.start, cut), EntryPart(self.owner, cut, self.stop)

    def release(self) -> None:
        owner = self.owner
        assert self in owner.parts, "a part was released twice"
        del owner.parts[self]
        if not owner.parts:
            owner.on_unused(owner)

    def fingerprint(self) -> int:
        """Its bytes are verified when they are read; this is what they are read by."""
        return hash((self.owner.key, self.start, self.stop))
