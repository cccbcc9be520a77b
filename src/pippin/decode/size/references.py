"""Walks references as a compiler does that follows each of them once. Knows no text."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from pippin.decode.size.size_limits import MAX_REFERENCE_DEPTH, check_limit

Name = TypeVar("Name", bound=Hashable)


def in_order(names: Iterable[Name], refers: Callable[[Name], Sequence[Name]]) -> list[Name]:
    """Every name after those that it refers to, but for those that refer back to it.

    Raises if the chain on the way to one of them is too long.
    """
    found: list[Name] = []
    seen: set[Name] = set()
    for first in names:
        if first in seen:
            continue
        seen.add(first)
        chain = [(first, iter(refers(first)))]
        while chain:
            name, rest = chain[-1]
            inner = next((each for each in rest if each not in seen), None)
            if inner is None:
                chain.pop()
                found.append(name)
            else:
                seen.add(inner)
                chain.append((inner, iter(refers(inner))))
                check_limit("references in a chain", len(chain) - 1, MAX_REFERENCE_DEPTH)
    return found
