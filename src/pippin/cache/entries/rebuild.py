"""Puts paths together again from the entries of a store. Knows no tree and no files.

An entry names where it begins by a chain key. That is the end of another entry, or a place inside
of one where a node was split before this entry was written:

    [ 0 ........ 60 ........ 100 )        one entry
                 [ 60 ...... 90 )         another, whose parent is the key at 60

Chain keys inside of entries are computed only for places where some entry begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from pippin.cache.entries.chain import Chain
from pippin.cache.entries.entry import Entry, Key


@dataclass(frozen=True)
class Placed:
    """An entry whose whole path is known."""

    entry: Entry
    chain: Chain  # at the entry's start
    above: Placed | None  # an entry that holds the token before `start`; None at the root
    root: bytes  # the chain key of the path's root: another for each salt

    def path_tokens(self) -> bytes:
        """All tokens from the root to the entry's end, as tree nodes keep them."""
        pieces = [self.entry.tokens]
        start, above = self.entry.start, self.above
        while above is not None:
            pieces.append(above.entry.tokens[: (start - above.entry.start) * 4])
            start, above = above.entry.start, above.above
        return b"".join(reversed(pieces))


@dataclass(frozen=True)
class Rebuilt:
    placed: list[Placed]  # parents before children
    orphans: list[Key]  # without a path from the root: not to be used


def rebuild(entries: Iterable[Entry], fingerprint: bytes) -> Rebuilt:
    """Order entries into paths from the root."""
    waiting: dict[bytes, list[Entry]] = defaultdict(list)  # by the chain key where they begin
    starts: set[int] = set()
    at_root: dict[bytes, None] = {}
    num_entries = 0
    for entry in entries:
        waiting[entry.parent].append(entry)
        starts.add(entry.start)
        if not entry.start:
            at_root[entry.parent] = None
        num_entries += 1
    plain = Chain(fingerprint)
    roots = [plain, *(Chain.of_root(key) for key in at_root if key != plain.key)]
    found = [
        Placed(entry, root, None, root.key) for root in roots for entry in waiting.pop(root.key, ())
    ]
    placed: list[Placed] = []
    orphans: list[Key] = []
    for above in found:  # grows while it is walked
        places = _places_inside(above, starts)
        if (places[-1] if places else above.chain).key != above.entry.key.chain:
            orphans.append(above.entry.key)  # its own tokens are not those of its name
            continue
        placed.append(above)
        for chain in places:
            below = waiting.pop(chain.key, ())
            found += [Placed(entry, chain, above, above.root) for entry in below]
    orphans += [entry.key for left in waiting.values() for entry in left]
    assert len(placed) + len(orphans) == num_entries
    return Rebuilt(placed, orphans)


def _places_inside(above: Placed, starts: set[int]) -> list[Chain]:
    """Chains at the places in (start, end] of an entry where others might begin, its end last."""
    start, end, chain = above.entry.start, above.entry.end, above.chain
    places = [at for at in range(start + 1, end) if at in starts]
    chains: list[Chain] = []
    for at in [*places, end] if end > start else []:
        chain = chain.extended(above.entry.tokens[(chain.length - start) * 4 : (at - start) * 4])
        chains.append(chain)
    return chains
