"""What the scheduler sees of the cache: match, lock, insert, evict.

    match    how much of a prompt need not be computed, and the payloads that replace it
    lock     keep those while the request runs
    insert   own what a step captured
    evict    free the least useful bytes

The tree owns payloads from `insert` on and releases each exactly once. One thread calls. Every verb
that takes tokens takes a salt: sequences of different salts never share anything.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy.typing as npt

from pippin.cache.policy import CheckpointPolicy, Placement
from pippin.cache.tree.canary import Canary
from pippin.cache.tree.components import INDEX, STATE, Rules
from pippin.cache.tree.payload_tree import PayloadTree
from pippin.cache.tree.radix import Node, TokenArray, as_tokens
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


NUM_SHOWN_TOKENS = 8

logger = logging.getLogger(__name__)


class PrefixCache(PayloadTree):
    """A radix tree whose nodes carry one payload per component, under one limit of bytes.

    Changes go through these verbs; what it inherits is to be read, for reports and other tiers.
    """

    def __init__(
        self,
        components: Sequence[Component],
        *,
        window: int = 0,
        capacity_bytes: int | None,
        canary: Canary | None = None,
        policy: CheckpointPolicy | None = None,
    ) -> None:
        """`capacity_bytes` None: no limit, and nothing is evicted."""
        self.capacity_bytes = capacity_bytes
        self.policy = policy or CheckpointPolicy()
        canary = canary if canary is not None and canary.mode != "off" else None
        super().__init__(Rules(components, window), canary, evicts=capacity_bytes is not None)
        self._locks: set[Lock] = set()

    @property
    def locked_ends(self) -> set[Node]:
        """The nodes where locked paths end."""
        return {lock.node for lock in self._locks if not lock.node.is_root}

    # --- find ---------------------------------------------------------------------------------

    def probe(self, tokens: npt.ArrayLike, salt: bytes = b"", *, limit: int | None = None) -> int:
        """The length `match` would return. Touches nothing: for ordering a queue."""
        path, reach = self._walk_sound(as_tokens(tokens), salt)
        return self.rules.deepest_valid(path, reach if limit is None else min(reach, limit))[1]

    def probe_prompt(self, tokens: npt.ArrayLike, salt: bytes = b"") -> int:
        """The length `match_prompt` would return. Touches nothing."""
        ids = as_tokens(tokens)
        path, reach = self._walk_sound(ids, salt)
        return self.rules.deepest_for_prompt(path, reach, len(ids))[1]

    def num_cached(self, tokens: npt.ArrayLike, salt: bytes = b"") -> int:
        """How many of these tokens are in the tree at all, restorable or not."""
        return self.radix.walk(as_tokens(tokens), salt)[1]

    def continuation(self, tokens: npt.ArrayLike, salt: bytes, limit: int) -> TokenArray:
        """At most `limit` tokens behind all of these, where some are; along what was used last."""
        ids = as_tokens(tokens)
        path, reach = self.radix.walk(ids, salt)
        if not path or reach < len(ids):
            return ids[:0]
        return self.radix.behind(path[-1], reach, limit)

    def match(self, tokens: npt.ArrayLike, salt: bytes = b"", *, limit: int | None = None) -> Match:
        """The longest restorable prefix of at most `limit` tokens; counts as a use of it."""
        ids = as_tokens(tokens)
        path, branch = self._walk_sound(ids, salt)
        reach = branch if limit is None else min(branch, limit)
        return self._match_at(ids, branch, *self.rules.deepest_valid(path, reach))

    def match_prompt(self, tokens: npt.ArrayLike, salt: bytes = b"") -> Match:
        """The longest restorable prefix of a prompt, after which a token is to be sampled.

        That is all of it where its hidden vector is kept; else its last token is not in it.
        """
        ids = as_tokens(tokens)
        path, branch = self._walk_sound(ids, salt)
        return self._match_at(ids, branch, *self.rules.deepest_for_prompt(path, branch, len(ids)))

    def payloads(self, lock: Lock) -> dict[Component, tuple[Payload, ...]]:
        """What restores a locked match, as the tree has it now: nodes may have been split since."""
        return self.rules.gather(lock.node)

    # --- lock ---------------------------------------------------------------------------------

    def lock_tokens(self, tokens: npt.ArrayLike, salt: bytes = b"") -> Lock:
        """Lock the path of these tokens, restorable or not, so that more can be added below it."""
        path, reach = self.radix.walk(as_tokens(tokens), salt)
        node = self.end_node(path[-1], reach) if path else self.radix.root
        return self.lock(InsertResult(reach, 0, node))

    def lock(self, at: Match | InsertResult) -> Lock:
        """Keep what `at` found until `unlock`; nothing may be evicted between the two calls."""
        node = at.node
        assert node.attached, f"stale: {at} was evicted before it was locked"
        if isinstance(at, Match):
            self._count_lookup(at)
        lock = Lock(at.length, node, self.locks.lock(node))
        self._locks.add(lock)
        return lock

    def unlock(self, lock: Lock) -> None:
        assert lock in self._locks, f"{lock} is not locked"
        self._locks.remove(lock)
        self.unlock_node(lock.node, lock.floor)
        self.drop_damaged(lock.node.ancestors())

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
        """Own the KV of tokens [start, len(tokens)), states at positions along them, and the
        `hidden` vector after the last one.

        Fills what the tree lacks and releases the rest. Attention KV must connect: if tokens before
        `start` are missing, all is released. States may lie before `start`, if their path is there.
        `placements` says why each state was captured: for eviction and the counters.
        Above the limit, what was there before is evicted first, then the least of this insert.
        """
        ids, rules = as_tokens(tokens), self.rules
        end = len(ids)
        self._check_incoming(start, end, kv, states)
        path, reach = self.radix.walk(ids, salt)
        if rules.has_attention and reach < start:
            self.stats.gaps += 1
            self.refuse(*kv.values(), *states.values(), *([] if hidden is None else [hidden]))
            return InsertResult(0, start - reach, self.radix.root)

        # A node of an attention model never lacks attention KV.
        grows = Component.ATTENTION in kv if rules.has_attention else bool(kv)
        if not grows:
            ids = ids[: reach if rules.has_attention else max([reach, *states])]
        tip = self.grow(path, reach, ids, salt, cuts=states)
        tick = self.touch(tip)
        filled = self.fill(tip, start, end, kv, states, hidden, placements or {})
        if self.capacity_bytes is not None:
            self.keep_within(self.capacity_bytes, tick, filled)
        if not tip.attached:
            path, _ = self.radix.walk(ids, salt)
            tip = path[-1] if path else self.radix.root
        return InsertResult(tip.end, 0, tip)

    def insert_component(
        self,
        tokens: npt.ArrayLike,
        component: Component,
        start: int,
        payload: Payload,
        salt: bytes = b"",
    ) -> InsertResult:
        """Insert one payload: KV of [start, len(tokens)), or what is kept after the last token."""
        ids = as_tokens(tokens)
        if component.divides:
            return self.insert(ids, start, {component: payload}, {}, salt=salt)
        states = {len(ids): payload} if component is Component.STATE else {}
        hidden = payload if component is Component.HIDDEN else None
        return self.insert(ids, len(ids), {}, states, hidden, salt=salt)

    # --- shrink -------------------------------------------------------------------------------

    def condemn(
        self, tokens: npt.ArrayLike, component: Component, start: int, salt: bytes = b""
    ) -> None:
        """The bytes of KV of [start, end) of this path, or of what is kept at its end, changed.

        No match reaches beyond that any more, and it is dropped when it is not locked.
        """
        ids, divides = as_tokens(tokens), component.divides
        path, end = self.radix.walk(ids, salt)[0], len(ids)
        nodes = [node for node in path if (node.end > start if divides else node.end == end)]
        for node in nodes:
            self.mark_damaged(node, INDEX[component])
        self.drop_damaged(nodes)
        where = f"over tokens [{start}, {end})" if divides else f"after token {end}"
        fault = f"cache entry {where} holds {component.value} bytes that have changed"
        if self.canary is None:
            logger.error(fault)
        else:
            self.canary.report(fault)

    def mark_copied(
        self,
        tokens: npt.ArrayLike,
        copies: Iterable[tuple[Component, int, int]],
        salt: bytes = b"",
    ) -> None:
        """The tier below has these of this path too: a component of [start, end), or at the end."""
        path, _ = self.radix.walk(as_tokens(tokens), salt)
        ends = [node.end for node in path]
        for component, start, end in copies:
            last = bisect_right(ends, end)
            for node in reversed(path[:last]):
                if not (node.start >= start if component.divides else node.end == end):
                    break
                self.mark_node_copied(node, INDEX[component])

    def set_capacity(self, capacity_bytes: int) -> None:
        """Move the limit, and evict down to it as far as locks allow."""
        self.capacity_bytes = capacity_bytes
        self.evict(self.nbytes - capacity_bytes)

    # --- check --------------------------------------------------------------------------------

    def counters(self) -> dict[str, object]:
        """The numbers of a report; does not walk the tree."""
        stats = asdict(self.stats)
        evictions, placements = stats.pop("evictions"), stats.pop("placements")
        return {
            "capacity_bytes": self.capacity_bytes,
            "locks": len(self._locks),
            "nodes": self.radix.num_nodes,
            "tokens": self.radix.num_tokens,
            "nbytes": self.nbytes,
            "evictable_bytes": self.evictable_bytes,
            "component_bytes": {kind.value: n for kind, n in self.component_bytes.items()},
            **stats,
            "hit_rate": self.stats.hit_rate,
            "evictions": {kind.value: n for kind, n in evictions.items()},
            "checkpoints": {kind.value: made for kind, made in placements.items()},
        }

    def report(self) -> dict[str, object]:
        """What is cached and how it was used, as plain JSON values; the paths used last, too."""
        paths = [_describe(end) for end in self.recent if end.attached]
        return self.counters() | {"recent_paths": paths}

    # --- inside -------------------------------------------------------------------------------

    def _check_incoming(
        self, start: int, end: int, kv: Mapping[Component, Payload], states: Mapping[int, Payload]
    ) -> None:
        keeps = self.rules.components
        for component, payload in kv.items():
            assert component in keeps, f"{component} for a model that keeps {keeps}"
            assert component.divides, f"{component} is no KV"
            assert payload.num_tokens == end - start, (
                f"{component} covers {payload.num_tokens} tokens, [{start}, {end}) is {end - start}"
            )
        assert not states or self.rules.has_state, f"states for a model that keeps {keeps}"
        assert all(0 < position <= end for position in states), f"states outside of (0, {end}]"

    def _walk_sound(self, ids: TokenArray, salt: bytes) -> tuple[list[Node], int]:
        """The nodes that share tokens with these, up to where damage begins."""
        path, reach = self.radix.walk(ids, salt)
        if self.num_damaged:
            reach = min([reach, *(node.start for node in path if node.damaged)])
        return path, reach

    def _match_at(self, ids: TokenArray, branch: int, node: Node | None, length: int) -> Match:
        end = self.radix.root if node is None else self.end_node(node, length)
        if self.canary is not None and not self.canary.verify_restore(ids[:length], end):
            end = self.radix.root
        self.touch(end)
        return Match(end.end, branch, len(ids), end, self.rules.gather(end))

    def _count_lookup(self, match: Match) -> None:
        self.stats.count_lookup(match.length, match.prompt_len)
        if not match.length:
            return
        match.node.hits += 1
        self.notify_changed(match.node)
        self.rules.count_use(match.node)
        if self.rules.has_state:
            placement = self.stats.placements[match.node.placement]
            placement.used += 1
            placement.tokens_saved += self.rules.num_saved(match.node)


def _describe(end: Node) -> dict[str, object]:
    path = list(end.ancestors())
    return {
        "tokens": end.end,
        "nodes": len(path),
        "nbytes": sum(node.nbytes for node in path),
        "checkpoints": sum(node.payloads[STATE] is not None for node in path),
        "first_tokens": path[-1].token_ids[:NUM_SHOWN_TOKENS].tolist(),
        "last_tokens": end.token_ids[-NUM_SHOWN_TOKENS:].tolist(),
        "locked": end.path_locks > 0,
    }
