"""A binary heap of nodes by rank that can also find, move and remove any of them.

`heapq` cannot: removed nodes would stay in it until they are first, and then thousands at once, in
the middle of one eviction. Knows nodes only by identity.
"""

from __future__ import annotations

import math

from pippin.cache.tree.radix import Node

Rank = tuple[float, int]  # level and worth, tick
LAST: Rank = (math.inf, 0)


class NodeHeap:
    def __init__(self) -> None:
        self._entries: list[tuple[Rank, Node]] = []
        self._places: dict[Node, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def rank_of(self, node: Node) -> Rank | None:
        """The rank under which a node was put; None if it is not there."""
        place = self._places.get(node)
        return None if place is None else self._entries[place][0]

    @property
    def least(self) -> Rank:
        """The rank of the first node; LAST without one."""
        return self._entries[0][0] if self._entries else LAST

    @property
    def first(self) -> Node:
        return self._entries[0][1]

    def put(self, node: Node, rank: Rank) -> None:
        """Add a node, or move one that is there."""
        place = self._places.get(node)
        if place is None:
            place = len(self._entries)
            self._entries.append((rank, node))
            self._raise(place)
        else:
            self._replace(place, (rank, node))

    def discard(self, node: Node) -> None:
        """Remove a node, if it is there."""
        place = self._places.pop(node, None)
        if place is None:
            return
        last = self._entries.pop()
        if place < len(self._entries):
            self._replace(place, last)

    def _replace(self, place: int, entry: tuple[Rank, Node]) -> None:
        old = self._entries[place][0]
        self._entries[place] = entry
        if entry[0] < old:
            self._raise(place)
        else:
            self._lower(place)

    def _raise(self, place: int) -> None:
        """Move an entry towards the first place, to where it belongs."""
        entries, places = self._entries, self._places
        entry = entries[place]
        rank = entry[0]
        while place > 0:
            above = entries[(place - 1) // 2]
            if above[0] <= rank:
                break
            entries[place] = above
            places[above[1]] = place
            place = (place - 1) // 2
        entries[place] = entry
        places[entry[1]] = place

    def _lower(self, place: int) -> None:
        """Move an entry away from the first place, to where it belongs."""
        entries, places = self._entries, self._places
        num_entries = len(entries)
        entry = entries[place]
        rank = entry[0]
        while (child := 2 * place + 1) < num_entries:
            below = entries[child]
            if child + 1 < num_entries and entries[child + 1][0] < below[0]:
                child += 1
                below = entries[child]
            if rank <= below[0]:
                break
            entries[place] = below
            places[below[1]] = place
            place = child
        entries[place] = entry
        places[entry[1]] = place
