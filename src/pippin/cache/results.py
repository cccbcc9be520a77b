"""What the cache returns: matches, locks, inserts. Knows nodes, and no tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pippin.cache.tree.radix import Node
from pippin.types import Component, Payload


@dataclass(frozen=True)
class Match:
    """The longest prefix of a prompt that every component can restore.

    `payloads` are borrowed and good until the next call that changes the tree; a request that was
    locked asks `PrefixCache.payloads` again when its plan is made.
    """

    length: int
    branch: int  # prompt tokens in the tree at all (>= length): where the prompt leaves it
    prompt_len: int
    node: Node = field(repr=False)  # ends at `length`
    payloads: Mapping[Component, tuple[Payload, ...]] = field(repr=False)  # in token order


@dataclass(frozen=True, eq=False)
class Lock:
    """Keeps a path, its window segment and its state until `PrefixCache.unlock`."""

    length: int
    node: Node = field(repr=False)
    floor: int = field(repr=False)  # where the locked window segment starts


@dataclass(frozen=True)
class InsertResult:
    length: int  # tokens of the sequence that the tree holds now, this insert's path included
    gap: int  # tokens before `start` that were missing; if any, nothing was inserted
    node: Node = field(repr=False)  # ends at `length`; `lock` takes it

    @property
    def inserted(self) -> bool:
        return self.gap == 0
