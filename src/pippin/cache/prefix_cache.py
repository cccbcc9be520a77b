"""What the scheduler sees of the cache: match, lock, insert, evict. Knows tokens, not arrays.

    match    how much of a prompt need not be computed, and the payloads that stand in for it
    lock     keep those while the request runs
    insert   take over what a step captured
    evict    give the least useful bytes back

Payloads are owned by the tree from `insert` on and released exactly once. One thread calls. Every
verb that takes tokens takes a salt: sequences of different salts never share anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy.typing as npt

from pippin.cache.policy import CheckpointPolicy, Placement
from pippin.cache.report import counters, recent_paths
from pippin.cache.results import InsertResult, Lock, Match
from pippin.cache.stats import CacheStats
from pippin.cache.tree.canary import Canary
from pippin.cache.tree.components import INDEX, Rules
from pippin.cache.tree.condemned import Condemned
from pippin.cache.tree.incoming import Incoming
from pippin.cache.tree.integrity import check_integrity
from pippin.cache.tree.observer import TreeObserver
from pippin.cache.tree.payload_tree import PayloadTree
from pippin.cache.tree.radix import Node, TokenArray, as_tokens
from pippin.types import Component, Payload


class PrefixCache:
    """A radix tree whose nodes carry one payload per component, under one ceiling of bytes."""

    def __init__(
        self,
        components: Sequence[Component],
        *,
        window: int = 0,
        capacity_bytes: int,
        canary: Canary | None = None,
        policy: CheckpointPolicy | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.policy = policy or CheckpointPolicy()
        self._canary = canary if canary is not None and canary.mode != "off" else None
        self._rules = Rules(components, window)
        self._store = PayloadTree(self._rules, self.policy, self._canary)
        self._tree = self._store.tree
        self._condemned = Condemned(self._store, self._canary)
        self._locks: set[Lock] = set()

    @property
    def nbytes(self) -> int:
        return self._store.nbytes

    @property
    def evictable_bytes(self) -> int:
        """What `evict` could free at most, as the locks are now: all that none of them holds."""
        return self._store.evictable_bytes

    @property
    def version(self) -> int:
        """Changes whenever `probe` may answer differently than before for some prompt."""
        return self._store.version

    @property
    def num_tokens(self) -> int:
        return self._tree.num_tokens

    @property
    def component_bytes(self) -> dict[Component, int]:
        return dict(self._store.component_bytes)

    @property
    def stats(self) -> CacheStats:
        return self._store.stats

    # --- watch --------------------------------------------------------------------------------

    def observe(self, observer: TreeObserver | None) -> None:
        """Have `observer` hear of every change from now on; None: nobody."""
        self._store.observer = observer

    @property
    def root(self) -> Node:
        """To be looked at, never changed."""
        return self._tree.root

    @property
    def num_nodes(self) -> int:
        return self._tree.num_nodes

    @property
    def tick(self) -> int:
        """Counts uses: a node's `stamp` has that of its last one."""
        return self._store.tick

    @property
    def locked_ends(self) -> set[Node]:
        """Where the paths end that are held."""
        return {lock.node for lock in self._locks if not lock.node.is_root}

    # --- find ---------------------------------------------------------------------------------

    def probe(self, tokens: npt.ArrayLike, salt: bytes = b"", *, limit: int | None = None) -> int:
        """The length `match` would return. Touches nothing: for ordering a queue."""
        path, reach = self._walk_sound(as_tokens(tokens), salt)
        return self._rules.deepest_valid(path, reach if limit is None else min(reach, limit))[1]

    def num_cached(self, tokens: npt.ArrayLike, salt: bytes = b"") -> int:
        """How many of these tokens lie in the tree at all, restorable or not."""
        return self._tree.walk(as_tokens(tokens), salt)[1]

    def probe_prompt(self, tokens: npt.ArrayLike, salt: bytes = b"") -> int:
        """The length `match_prompt` would return. Touches nothing."""
        ids = as_tokens(tokens)
        path, reach = self._walk_sound(ids, salt)
        return self._rules.deepest_for_prompt(path, reach, len(ids))[1]

    def match(self, tokens: npt.ArrayLike, salt: bytes = b"", *, limit: int | None = None) -> Match:
        """The longest restorable prefix of at most `limit` tokens; counts as a use of it."""
        ids = as_tokens(tokens)
        path, branch = self._walk_sound(ids, salt)
        reach = branch if limit is None else min(branch, limit)
        return self._found(ids, branch, *self._rules.deepest_valid(path, reach))

    def match_prompt(self, tokens: npt.ArrayLike, salt: bytes = b"") -> Match:
        """The longest restorable prefix of a prompt, after which a token is to be sampled.

        That is all of it where its hidden vector is kept; else its last token is not in it.
        """
        ids = as_tokens(tokens)
        path, branch = self._walk_sound(ids, salt)
        return self._found(ids, branch, *self._rules.deepest_for_prompt(path, branch, len(ids)))

    def walk(self, tokens: npt.ArrayLike, salt: bytes = b"") -> tuple[list[Node], int]:
        """The nodes that share tokens with these, and how many they share. Touches nothing."""
        return self._tree.walk(as_tokens(tokens), salt)

    def nodes(self) -> Iterator[Node]:
        """All of them, parents before children."""
        return self._tree.nodes()

    def cut(self, node: Node, position: int) -> Node:
        """The node on the path to `node` that ends at `position`, split off if need be."""
        return self._store.end_node(node, position)

    def payloads(self, lock: Lock) -> dict[Component, tuple[Payload, ...]]:
        """What restores a locked match, as the tree holds it now: others may have split nodes."""
        return self._rules.gather(lock.node)

    # --- hold ---------------------------------------------------------------------------------

    def lock_tokens(self, tokens: npt.ArrayLike, salt: bytes = b"") -> Lock:
        """Keep what lies along these tokens, restorable or not, so that more can connect to it."""
        path, reach = self._tree.walk(as_tokens(tokens), salt)
        node = self._store.end_node(path[-1], reach) if path else self._tree.root
        return self.lock(InsertResult(reach, 0, node))

    def lock(self, at: Match | InsertResult) -> Lock:
        """Keep what `at` found until `unlock`; nothing may be evicted between the two calls."""
        node = at.node
        assert node.attached, f"stale: {at} was evicted before it was locked"
        if isinstance(at, Match):
            self._count_lookup(at)
        lock = Lock(at.length, node, self._store.lock(node))
        self._locks.add(lock)
        return lock

    def unlock(self, lock: Lock) -> None:
        assert lock in self._locks, f"{lock} is not held"
        self._locks.remove(lock)
        self._store.unlock(lock.node, lock.floor)
        self._condemned.drop(lock.node.ancestors())

    # --- grow ---------------------------------------------------------------------------------

    def insert(
        self,
        tokens: npt.ArrayLike,
        start: int,
        kv: Mapping[Component, Payload],
        states: Mapping[int, Payload],
        hidden: Payload | None = None,
        *,
        salt: bytes = b"",
        placements: Mapping[int, Placement] | None = None,
    ) -> InsertResult:
        """Take over the KV of tokens [start, len(tokens)), states at positions along them, and
        the `hidden` vector after the last one.

        Fills what the tree lacks and releases the rest. Attention KV must connect: if tokens before
        `start` are missing, all is released. States may lie before `start`, if their path is there.
        `placements` says why each state was taken; it only steers eviction and the counters.
        If that passes the ceiling, others are evicted, then the least of what came in.
        """
        ids = as_tokens(tokens)
        incoming = Incoming(start, len(ids), kv, states, hidden, placements or {})
        incoming.check(self._rules)
        path, reach = self._tree.walk(ids, salt)
        if self._rules.has_attention and reach < start:
            self.stats.gaps += 1
            self._store.refuse(*incoming.payloads)
            return InsertResult(0, start - reach, self._tree.root)

        ids = ids[: incoming.path_end(self._rules, reach)]
        tip = self._store.grow(path, reach, ids, salt, cuts=states)
        tick = self._store.touch(tip)
        filled = incoming.fill(self._store, tip)
        self._store.keep_within(self.capacity_bytes, tick, filled)
        if not tip.attached:
            path, _ = self._tree.walk(ids, salt)
            tip = path[-1] if path else self._tree.root
        return InsertResult(tip.end, 0, tip)

    # --- shrink -------------------------------------------------------------------------------

    def evict(self, nbytes: int) -> int:
        """Free at least `nbytes`, or all `evictable_bytes` if that is less; returns the bytes."""
        return self._store.evict(nbytes)

    def discard(self, node: Node, component: Component, limit: int | None = None) -> int:
        """Drop a component of a node, and of attention all that hangs below; 0 if it is locked.

        Returns the number of nodes that changed. With a `limit` no more than so many are removed,
        leaves first: then the component may still be there.
        """
        return self._store.discard(node, component, limit)

    def condemn(
        self, tokens: npt.ArrayLike, component: Component, start: int, salt: bytes = b""
    ) -> None:
        """KV of [start, end) of this path, or what is kept after its end, is not what it was.

        Nothing is matched from there on any more, and it goes when no lock holds it.
        """
        ids = as_tokens(tokens)
        path, _ = self._tree.walk(ids, salt)
        self._condemned.condemn(path, len(ids), component, start)

    def mark_copied(
        self, tokens: npt.ArrayLike, component: Component, start: int, salt: bytes = b""
    ) -> None:
        """The tier below has a component of this path too: of [start, end), or at its end."""
        ids = as_tokens(tokens)
        path, _ = self._tree.walk(ids, salt)
        divides = component in (Component.ATTENTION, Component.WINDOW)
        for node in path:
            within = node.start >= start if divides else node.end == len(ids)
            if within and node.end <= len(ids):
                self._store.mark_copied(node, INDEX[component])

    def set_capacity(self, capacity_bytes: int) -> None:
        """Move the ceiling, and come down to it as far as locks allow."""
        self.capacity_bytes = capacity_bytes
        self.evict(self.nbytes - capacity_bytes)

    def flush(self) -> None:
        """Drop everything that is not locked."""
        self._store.flush()

    # --- look ---------------------------------------------------------------------------------

    def sweep(self, num_nodes: int) -> int:
        """Have the canary check some more nodes; returns the faults found."""
        return 0 if self._canary is None else self._canary.sweep(self._tree, num_nodes)

    def check_integrity(self) -> None:
        """Count everything again; raises AssertionError with what does not add up."""
        check_integrity(self._store, [(lock.node, lock.floor) for lock in self._locks])

    def check_when_idle(self) -> None:
        if self._canary is not None:
            self._canary.check_when_idle(self._tree, self.check_integrity)

    def counters(self) -> dict[str, object]:
        """The numbers of a report; does not look at the tree."""
        return counters(self._store, capacity_bytes=self.capacity_bytes, num_locks=len(self._locks))

    def report(self) -> dict[str, object]:
        """What is held and what it was good for, as plain JSON values."""
        return self.counters() | {"recent_paths": recent_paths(self._store)}

    # --- inside -------------------------------------------------------------------------------

    def _walk_sound(self, ids: TokenArray, salt: bytes) -> tuple[list[Node], int]:
        """The nodes that share tokens with these, up to where damage begins."""
        path, reach = self._tree.walk(ids, salt)
        return path, self._condemned.sound_reach(path, reach)

    def _found(self, ids: TokenArray, branch: int, node: Node | None, length: int) -> Match:
        end = self._tree.root if node is None else self._store.end_node(node, length)
        if self._canary is not None and not self._canary.verify_restore(ids[:length], end):
            end = self._tree.root
        self._store.touch(end)
        return Match(end.end, branch, len(ids), end, self._rules.gather(end))

    def _count_lookup(self, match: Match) -> None:
        self.stats.count_lookup(match.length, match.prompt_len)
        if not match.length:
            return
        match.node.hits += 1
        self._store.tell_changed(match.node)
        self._rules.count_use(match.node)
        if self._rules.has_state:
            placement = self.stats.placements[match.node.placement]
            placement.used += 1
            placement.tokens_saved += self._rules.num_saved(match.node)
