"""The tree of what a tier below memory has: the rules of the one in memory, over parts of entries.

It evicts nothing. The store keeps within its bytes and reports what it evicted. That and all below
it leaves the tree as soon as it is not locked, a bounded number of nodes in each step
(`remove_lost`). Until then `CacheTier.find` knows that it is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np

from pippin.cache.entries.chain import Chain
from pippin.cache.entries.entry import ArraySpec, Entry, Key
from pippin.cache.entries.entry_store import EntryStore
from pippin.cache.entries.rebuild import rebuild
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tiers.parts import EntryPart, Owned, num_parts
from pippin.cache.tree.canary import Canary
from pippin.cache.tree.observer import TreeObserver
from pippin.cache.tree.radix import Node, TokenArray
from pippin.types import Component, Payload

MAX_REMOVALS = 8  # nodes and parts in one `remove_lost`: about half a millisecond on a slow core
# A path first, then where it can end, then what is kept only at such an end.
ORDER = (Component.ATTENTION, Component.STATE, Component.WINDOW, Component.HIDDEN)

# How a payload of so many tokens looks as bytes: `Backend.payload_arrays`.
Format = Callable[[Component, int], tuple[ArraySpec, ...]]


class TierTree:
    def __init__(
        self,
        fingerprint: bytes,
        components: Sequence[Component],
        window: int,
        format: Format,
        canary: Canary,
    ) -> None:
        self.cache = PrefixCache(components, window=window, capacity_bytes=None, canary=canary)
        self._fingerprint = fingerprint
        self._components = tuple(components)
        self._format = format
        self._owned: dict[Key, Owned] = {}
        self._lost: dict[Key, Owned] = {}  # these leave the tree once they are not locked
        self._num_added = 0  # since the last `remove_lost`: as many more leave the tree
        self._unused: list[Key] = []  # nothing of these is in the tree any more
        # Of the salt and the tokens that were hashed last.
        self._last_chain = b"", b"", Chain(fingerprint)
        self.num_unreadable = 0  # entries that did not read back as they were written
        self.cache.tree.observers += (_Places(),)

    @property
    def num_entries(self) -> int:
        return len(self._owned)

    def fill(self, store: EntryStore) -> None:
        """Add what an earlier process wrote; what has no path from the root is not wanted."""
        found = rebuild(store.entries(), self._fingerprint)
        self._unused += found.orphans
        plain = Chain(self._fingerprint).key
        for placed in sorted(found.placed, key=lambda one: ORDER.index(one.entry.key.component)):
            entry = placed.entry
            if self._is_readable(entry):
                ids = np.frombuffer(placed.path_tokens(), dtype=np.int32)
                self.add(ids, entry, b"" if placed.root == plain else placed.root)
            else:
                self._unused.append(entry.key)  # of a backend with another layout
        self._num_added = 0

    def _is_readable(self, entry: Entry) -> bool:
        component = entry.key.component
        is_kept = component in self._components
        return is_kept and entry.arrays == self._format(component, num_parts(entry))

    def root(self, salt: bytes) -> bytes:
        """What this tree has in place of a salt: an earlier process left a chain's root alone."""
        return Chain(self._fingerprint, salt).key if salt else b""

    def entry(self, ids: TokenArray, component: Component, start: int, salt: bytes = b"") -> Entry:
        """The entry for a component of the path `ids`: KV of [start, end), or what is at its end.

        For the latter, `start` is how much of the path this tree has already.
        """
        (entry,) = self.entries(ids, ((component, start, len(ids)),), salt)
        return entry

    def entries(
        self, ids: TokenArray, runs: Sequence[tuple[Component, int, int]], salt: bytes = b""
    ) -> list[Entry]:
        """The entries for components of the path `ids`, each from a start to an end."""
        chains = self._chains(ids, {at for _, *ends in runs for at in ends}, salt)
        entries: list[Entry] = []
        for component, start, end in runs:
            num_tokens = end - start if component.divides else 0
            key = Key(chains[end].key, component, num_tokens)
            specs = self._format(component, num_tokens or 1)
            entries.append(Entry(key, chains[start].key, start, ids[start:end].tobytes(), specs))
        return entries

    def _chains(self, ids: TokenArray, places: set[int], salt: bytes) -> dict[int, Chain]:
        """At these places of a path: hashed once, and on from where the last path ended."""
        root, tokens, chain = self._last_chain
        first = min(places, default=0)
        if root != salt or chain.length > first or ids[: chain.length].tobytes() != tokens:
            chain = Chain(self._fingerprint, salt)
        chains: dict[int, Chain] = {}
        for place in sorted(places):
            if place > chain.length:
                chain = chain.extended(ids[chain.length : place])
            chains[place] = chain
        self._last_chain = salt, ids[: chain.length].tobytes(), chain
        return chains

    def add(self, ids: TokenArray, entry: Entry, root: bytes = b"") -> None:
        """An entry has been written; it is not wanted where it does not connect."""
        self.add_all(ids[: entry.end], [entry], root)

    def add_all(self, ids: TokenArray, entries: Iterable[Entry], root: bytes = b"") -> None:
        """Entries of one path. All its states are inserted in one walk along it."""
        states: dict[int, Payload] = {}
        for entry in entries:
            part = self._part(entry)
            if part is None:
                continue
            if entry.key.component is Component.STATE:
                states[entry.end] = part
                continue
            # What is kept behind a state needs it.
            states = self._insert_states(ids, states, root)
            path = ids[: entry.end]
            self.cache.insert_component(path, entry.key.component, entry.start, part, root)
        self._insert_states(ids, states, root)

    def _insert_states(
        self, ids: TokenArray, states: dict[int, Payload], root: bytes
    ) -> dict[int, Payload]:
        """Returns those that are left to insert: none."""
        if states:
            self.cache.insert(ids[: max(states)], 0, {}, states, salt=root)
        return {}

    def _part(self, entry: Entry) -> EntryPart | None:
        """All of it, to be inserted; None if the tree names it already."""
        owner = self._owned.get(entry.key)
        if owner is None or self._is_flushed(owner):
            self._lost.pop(entry.key, None)
            owner = self._owned[entry.key] = Owned(entry, self._forget)
        elif self._lost.pop(entry.key, None) is None:
            return None
        owner.unreadable = False
        self._num_added += 1
        # Of one that was lost, what had left the tree by now is missing; the rest is released.
        return owner.part()

    def lose(self, keys: Iterable[Key], *, unreadable: bool = False) -> None:
        """The store does not have these any more, or they cannot be used."""
        for key in keys:
            owner = self._owned.get(key)
            if owner is None:
                continue
            self._lost[key] = owner
            if unreadable and not owner.unreadable:  # a store may have reported it before
                owner.unreadable = True
                self.num_unreadable += 1

    def remove_lost(self) -> list[Key]:
        """Remove some of what was lost from the tree; returns keys that the store may forget."""
        left, self._num_added = MAX_REMOVALS + self._num_added, 0
        for owner in list(islice(self._lost.values(), left)):
            if left <= 0:
                break
            left -= self._remove(owner, left)
            if owner.parts and left > 0:  # locked: tried again after the others
                self._lost[owner.key] = self._lost.pop(owner.key)
        unused, self._unused = self._unused, []
        return unused

    def is_lost(self, key: Key) -> bool:
        return key in self._lost

    def check_integrity(self) -> None:
        self.cache.check_integrity()
        live: dict[Owned, int] = {}
        for node in self.cache.radix.nodes():
            for payload in node.payloads:
                if payload is not None:
                    assert isinstance(payload, EntryPart)
                    live[payload.owner] = live.get(payload.owner, 0) + payload.num_tokens
                    assert payload.node is node, "a part does not know its node"
        owned = {owner: sum(part.num_tokens for part in owner.parts) for owner in live}
        assert live == owned, "entries of a tier and parts in its tree do not add up"
        named = set(self._owned.values())
        assert named <= live.keys(), "the tree names an entry of which it has nothing"
        assert all(map(self._is_flushed, live.keys() - named)), "an entry is named twice"
        assert self._lost.keys() <= self._owned.keys(), "what is not in the tree is kept as lost"

    def _remove(self, owner: Owned, limit: int) -> int:
        """Up to `limit` parts of an entry, or nodes below them; returns how many were looked at."""
        tree, removed = self.cache.tree, 0
        for part in list(islice(owner.parts, limit)):
            node = part.node
            assert node is not None
            if part in owner.parts:  # or else it was below another one
                removed += max(1, tree.discard(node, owner.key.component, limit - removed))
            if removed >= limit:
                break
        return removed

    def _is_flushed(self, owner: Owned) -> bool:
        """Whether no match finds an entry by any of its parts, and these wait to be freed."""
        if not self.cache.flushing:
            return False
        nodes = (part.node for part in owner.parts)
        return all(node is not None and self.cache.radix.is_flushed(node) for node in nodes)

    def _forget(self, owner: Owned) -> None:
        if self._owned.get(owner.key) is not owner:
            return  # flushed, and added again since: the store keeps it
        del self._owned[owner.key]
        self._lost.pop(owner.key, None)
        self._unused.append(owner.key)


class _Places(TreeObserver):
    """Keeps in each part the node that has it."""

    def changed(self, node: Node) -> None:
        for payload in node.payloads:
            if payload is not None:
                assert isinstance(payload, EntryPart)
                payload.node = node

    def split(self, upper: Node, lower: Node) -> None:
        self.changed(upper)
        self.changed(lower)
