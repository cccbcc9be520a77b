"""A payload that minds its own life, and a cache without a tree to compare with.

The naive cache is the set of live payloads: each knows which prefixes (tuples of tokens) it covers,
so what a match must return follows from the rules alone, by trying every length.

To the naive cache a salt is nothing but other tokens: those of salt `n` are `n * SPACE` higher. The
real one is given the plain tokens and the salt.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from integrity import check_integrity
from pippin.cache.prefix_cache import InsertResult, Lock, Match, PrefixCache
from pippin.cache.tree.canary import Canary
from pippin.types import Component, Payload

Prefix = tuple[int, ...]
A, W, S, H = Component.ATTENTION, Component.WINDOW, Component.STATE, Component.HIDDEN
SPACE = 1_000
SALTS = (b"", b"a salt", b"another")
NBYTES = {A: 3, W: 2, S: 40, H: 5}  # per token, per token, per state, per hidden vector


def salted(tokens: Sequence[int]) -> tuple[np.ndarray, bytes]:
    """What the real cache is given in place of these."""
    ids = np.array(tokens)
    return ids % SPACE, SALTS[int(ids[0]) // SPACE]


def with_salt(tokens: Iterable[int], number: int) -> list[int]:
    return [token + number * SPACE for token in tokens]


@dataclass
class Ledger:
    """Every payload that was made and is neither released nor split."""

    live: dict[int, Piece] = field(default_factory=dict)
    flushed: set[int] = field(default_factory=set)  # of these, what is only waiting to be freed
    num_made: int = 0

    def kv(self, component: Component, tokens: Sequence[int], start: int) -> Piece:
        return Piece(self, component, [tuple(tokens[: i + 1]) for i in range(start, len(tokens))])

    def state(self, tokens: Sequence[int], position: int) -> Piece:
        return Piece(self, S, [tuple(tokens[:position])])

    def hidden(self, tokens: Sequence[int]) -> Piece:
        return Piece(self, H, [tuple(tokens)])

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.live.values())

    @property
    def valid(self) -> list[Piece]:
        return [piece for number, piece in self.live.items() if number not in self.flushed]

    def held(self, component: Component) -> set[Prefix]:
        found = [p for x in self.valid if x.component is component for p in x.prefixes]
        assert len(found) == len(set(found)), f"{component} is held twice somewhere in {found}"
        return set(found)


class Piece:
    def __init__(self, ledger: Ledger, component: Component, prefixes: list[Prefix]) -> None:
        assert prefixes, "a payload over no tokens"
        self.ledger = ledger
        self.component = component
        self.prefixes = prefixes
        self.contents = hash(tuple(prefixes))
        self.number = ledger.num_made
        ledger.live[self.number] = self
        ledger.num_made += 1

    @property
    def nbytes(self) -> int:
        return NBYTES[self.component] * len(self.prefixes)

    @property
    def num_tokens(self) -> int:
        return len(self.prefixes)

    @property
    def alive(self) -> bool:
        return self.number in self.ledger.live

    def split(self, at: int) -> tuple[Piece, Piece]:
        assert self.component in (A, W), f"a {self.component} was split"
        assert 0 < at < len(self.prefixes), f"split {len(self.prefixes)} tokens at {at}"
        assert self.number not in self.ledger.flushed, "what was flushed is split"
        self.release()
        head, tail = self.prefixes[:at], self.prefixes[at:]
        return Piece(self.ledger, self.component, head), Piece(self.ledger, self.component, tail)

    def release(self) -> None:
        assert self.alive, f"{self.component} released twice, or after its split"
        self.ledger.flushed.discard(self.number)
        del self.ledger.live[self.number]

    def fingerprint(self) -> int:
        assert self.alive, "fingerprint of a payload that is gone"
        return self.contents


class CheckedCache:
    """A PrefixCache whose every answer is compared with the naive one."""

    def __init__(
        self,
        components: Sequence[Component],
        *,
        window: int = 0,
        capacity: int = 1 << 40,
        canary: Canary | None = None,
    ) -> None:
        self.components = tuple(components)
        self.window = window
        self.ledger = Ledger()
        self.cache = PrefixCache(components, window=window, capacity_bytes=capacity, canary=canary)
        self.locks: list[tuple[Lock, Prefix]] = []
        self.growing: list[tuple[Lock, Prefix]] = []  # where an insert ended, restorable or not
        self.probed: dict[Prefix, int] = {}  # what the last few prompts would match
        self.probed_version = 0

    def match(self, tokens: Sequence[int], limit: int | None = None) -> Match:
        probed = self.cache.probe(*salted(tokens), limit=limit)
        match = self.cache.match(*salted(tokens), limit=limit)
        reach = len(tokens) if limit is None else min(limit, len(tokens))
        expected = next(n for n in range(reach, -1, -1) if self.valid(tokens, n))
        assert match.length == probed == expected
        if limit is None:
            self.probed = {**dict(list(self.probed.items())[-7:]), tuple(tokens): probed}
        assert match.length <= match.branch <= len(tokens)
        if A in self.components:
            assert match.branch == self.reach(tokens)
        self.check_payloads(tokens, expected, match.payloads)
        return match

    def match_prompt(self, tokens: Sequence[int]) -> Match:
        """All of it only with its hidden vector; else the longest that leaves a token."""
        probed = self.cache.probe_prompt(*salted(tokens))
        match = self.cache.match_prompt(*salted(tokens))
        reach = len(tokens) - (tuple(tokens) not in self.ledger.held(H))
        expected = next(n for n in range(reach, -1, -1) if self.valid(tokens, n))
        assert match.length == probed == expected
        self.check_payloads(tokens, expected, match.payloads)
        return match

    def lock(self, tokens: Sequence[int], limit: int | None = None) -> None:
        self._lock(tokens, self.match(tokens, limit))

    def lock_prompt(self, tokens: Sequence[int]) -> None:
        self._lock(tokens, self.match_prompt(tokens))

    def _lock(self, tokens: Sequence[int], match: Match) -> None:
        self.locks.append((self.cache.lock(match), tuple(tokens[: match.length])))

    def lock_inserted(self, tokens: Sequence[int], result: InsertResult) -> None:
        self.growing.append((self.cache.lock(result), tuple(tokens[: result.length])))

    def unlock(self, which: int) -> None:
        which %= len(self.locks) + len(self.growing)
        held = self.locks if which < len(self.locks) else self.growing
        lock, _ = held.pop(which % len(held))
        self.cache.unlock(lock)

    def insert(
        self,
        tokens: Sequence[int],
        start: int,
        states: Iterable[int] = (),
        kv: Iterable[Component] | None = None,
        *,
        hidden: bool = False,
    ) -> InsertResult:
        kv = [c for c in self.components if c in (A, W) and (kv is None or c in kv)]
        kv = kv if start < len(tokens) else []
        before, nbytes = {c: self.ledger.held(c) for c in self.components}, self.cache.nbytes
        reach, num_evicted = self.reach(tokens), self.num_evicted
        payloads = {c: self.ledger.kv(c, tokens, start) for c in kv}
        captured = {p: self.ledger.state(tokens, p) for p in states if S in self.components}
        wanted: dict[Component, set[Prefix]] = {c: set() for c in self.components}
        last = self.ledger.hidden(tokens) if hidden and H in self.components else None
        for payload in [*payloads.values(), *captured.values()]:
            wanted[payload.component] = wanted[payload.component] | set(payload.prefixes)

        ids, salt = salted(tokens)
        result = self.cache.insert(ids, start, payloads, captured, last, salt=salt)
        if last is not None and result.length == len(tokens) and self.keeps_hidden(tokens):
            wanted[H] = {tuple(tokens)}
        fits = self.num_evicted == num_evicted
        if A in self.components:
            assert result.gap == max(0, start - reach)
            limit = 0 if result.gap else len(tokens) if A in kv else reach
            wanted = {c: {p for p in ps if len(p) <= limit} for c, ps in wanted.items()}
        for component, held in before.items():
            if fits:
                assert self.ledger.held(component) == held | wanted[component]
            else:
                assert self.ledger.held(component) <= held | wanted[component]
        if self.cache.nbytes > self.cache.capacity_bytes:
            assert self.cache.nbytes <= nbytes
            assert self.cache.evictable_bytes == 0
        return result

    def evict(self, nbytes: int) -> int:
        before, evictable = self.ledger.nbytes, self.cache.evictable_bytes
        freed = self.cache.evict(nbytes)
        assert freed == before - self.ledger.nbytes
        assert freed >= min(nbytes, evictable)
        if freed < nbytes:
            assert freed == evictable
            self.check_only_locked_left()
        return freed

    def flush(self) -> None:
        self.begin_flush()
        self.free_flushed(1 << 40)
        assert self.cache.evictable_bytes == 0
        self.check_only_locked_left()

    def begin_flush(self) -> None:
        """Nothing that was flushed is in the naive cache any more, though it is still alive."""
        self.cache.flush()
        for node in filter(self.cache.radix.is_flushed, self.cache.radix.nodes()):
            self.ledger.flushed |= {p.number for p in node.payloads if p is not None}
        self.check_only_locked_valid()

    def free_flushed(self, num_nodes: int) -> None:
        valid, num_flushed = self.ledger.valid, len(self.ledger.flushed)
        before = self.cache.radix.num_nodes
        freed = self.cache.free_flushed(num_nodes)
        assert freed <= num_nodes
        assert freed <= before - self.cache.radix.num_nodes
        assert self.ledger.valid == valid, "only what was flushed is freed"
        assert bool(self.ledger.flushed) == self.cache.flushing or freed == num_nodes
        assert not num_flushed or freed

    def set_capacity(self, capacity: int) -> None:
        self.cache.set_capacity(capacity)
        if self.cache.nbytes > capacity:
            self.check_only_locked_left()

    @property
    def num_evicted(self) -> int:
        return sum(self.cache.stats.evictions.values())

    # --- the rules, by brute force ---

    def valid(self, tokens: Sequence[int], length: int) -> bool:
        if length == 0:
            return True
        if A in self.components and self.reach(tokens) < length:
            return False
        low = max(0, length - self.window)
        if W in self.components and not self.prefixes(tokens, low, length) <= self.ledger.held(W):
            return False
        return S not in self.components or tuple(tokens[:length]) in self.ledger.held(S)

    def keeps_hidden(self, tokens: Sequence[int]) -> bool:
        """Where there are states, only beside one: else nobody could be restored there."""
        return S not in self.components or tuple(tokens) in self.ledger.held(S)

    def reach(self, tokens: Sequence[int]) -> int:
        held = self.ledger.held(A)
        count = 0
        while count < len(tokens) and tuple(tokens[: count + 1]) in held:
            count += 1
        return count

    @staticmethod
    def prefixes(tokens: Sequence[int], low: int, high: int) -> set[Prefix]:
        return {tuple(tokens[: i + 1]) for i in range(low, high)}

    # --- what must hold after every operation ---

    def check(self) -> None:
        check_integrity(self.cache)
        assert self.cache.nbytes == self.ledger.nbytes, "a payload leaked or was forgotten"
        assert self.cache.evictable_bytes == self.ledger.nbytes - self.locked_bytes()
        self.check_version()
        for lock, tokens in self.locks:
            self.check_payloads(tokens, len(tokens), self.cache.payloads(lock))
        for _, tokens in self.growing:
            assert A not in self.components or self.reach(tokens) == len(tokens)

    def locked_bytes(self) -> int:
        """Of every payload over a token that a lock holds: windows from the lock's floor on."""
        held: set[tuple[Component, Prefix]] = set()
        for lock, tokens in [*self.locks, *self.growing]:
            hidden_from = len(tokens) - 1 if S in self.components else 0
            lows = ((A, 0), (W, lock.floor), (S, len(tokens) - 1), (H, hidden_from))
            for component, low in lows:
                held |= {(component, p) for p in self.prefixes(tokens, max(0, low), len(tokens))}
        return sum(
            NBYTES[x.component]
            for x in self.ledger.valid
            for p in x.prefixes
            if (x.component, p) in held
        )

    def check_by_evicting_a_copy(self) -> None:
        """What could be evicted is what goes when a copy of the cache drops all it can."""
        copied = copy.deepcopy(self.cache)
        assert copied.evict(1 << 60) == self.cache.evictable_bytes
        assert copied.evictable_bytes == 0
        check_integrity(copied)

    def check_version(self) -> None:
        """As long as the version stays the same, so does every probe."""
        probed = {tokens: self.cache.probe(*salted(tokens)) for tokens in self.probed}
        if self.cache.version == self.probed_version:
            assert probed == self.probed
        self.probed, self.probed_version = probed, self.cache.version

    def check_payloads(
        self,
        tokens: Sequence[int],
        length: int,
        payloads: dict[Component, tuple[Payload, ...]],
    ) -> None:
        """They are alive, in token order, end at `length` and cover what a restore needs."""
        if length == 0:
            assert not payloads
            return
        assert set(payloads) == set(self.components)
        for component, pieces in payloads.items():
            for piece in pieces:
                assert piece.alive
            covered = [prefix for piece in pieces for prefix in piece.prefixes]
            if component is H:
                assert covered == [p for p in [tuple(tokens[:length])] if p in self.ledger.held(H)]
                continue
            first = {A: 0, W: length - len(covered), S: length - 1}[component]
            assert covered == [tuple(tokens[: i + 1]) for i in range(first, length)]
            assert component is not W or len(covered) >= min(self.window, length)

    def check_only_locked_left(self) -> None:
        assert not self.ledger.flushed
        self.check_only_locked_valid()
        if not any(tokens for _, tokens in [*self.locks, *self.growing]):
            assert self.cache.radix.num_tokens == 0

    def check_only_locked_valid(self) -> None:
        """Attention and states exactly; windows divide only with nodes, so some more may stay."""
        ends = {tokens for _, tokens in [*self.locks, *self.growing] if tokens}
        if A in self.components:
            paths = [self.prefixes(tokens, 0, len(tokens)) for tokens in ends]
            assert self.ledger.held(A) == set[Prefix]().union(*paths)
        if S in self.components:
            assert self.ledger.held(S) <= ends
