"""Requests that wait for their prompt from a prefill engine. Knows no arrays and no sockets.

    queue ──▶ loading: asked for, entries arrive ──▶ queue ──▶ loading: a load, as of any tier
                       └─ late, refused, disconnected ──▶ queue: what is missing is computed

Entries are added to the tier's tree as they arrive. When the last one has, the requests are queued
again, and a load finds them; then they are forgotten, since memory has them. Nothing is ever waited
for longer than computing it here would take a few times.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from pippin.cache.entries.entry import Key
from pippin.cache.peers.peer_store import Arrived, PeerStore
from pippin.cache.peers.wanted import Wanted
from pippin.cache.results import Lock
from pippin.cache.tiers.cache_tier import CacheTier
from pippin.scheduler.request import Request

MIN_WANTED_TOKENS = 256  # fewer are computed sooner than asked for
MAX_HANDOVERS = 32  # under way; further requests compute their prompts here
LEAST_PATIENCE = 1.0  # seconds without an arrival
PATIENCE = 2.0  # times what computing should take here; then it is late
FIRST_PATIENCE = 10.0  # seconds, while it is unknown what computing takes
MAX_PATIENCES = 4.0  # from its start to its end, however much arrives


@dataclass
class HandoverStats:
    """Counters since start."""

    asked: int = 0  # prompts
    arrived: int = 0  # whole
    partial: int = 0  # ended by the prefill engine before the whole prompt had arrived
    late: int = 0  # given up because computing here was expected to be faster
    cancelled: int = 0  # because their requests ended, or their bytes were needed
    arrived_bytes: int = 0
    waited_seconds: float = 0.0  # of all


@dataclass(eq=False)
class Handover:
    wanted: Wanted
    memory_lock: Lock  # on what the first entry connects to
    keys: list[Key]  # that the tier's tree names because of it
    patience: float
    began: float
    deadline: float  # moves with each arrival
    waiters: list[Request] = field(default_factory=list)

    @property
    def last_deadline(self) -> float:
        return self.began + MAX_PATIENCES * self.patience


class Handovers:
    def __init__(self, tiers: CacheTier, store: PeerStore) -> None:
        self._tiers = tiers
        self._store = store
        self._ids = (f"handover-{number}" for number in itertools.count())
        self._under_way: dict[str, Handover] = {}
        self._ended: list[Handover] = []  # whose entries a load may still have to find
        self._num_named: Counter[Key] = Counter()  # by how many of both
        self._ready: list[Request] = []  # to be queued again
        self.stats = HandoverStats()

    @property
    def num_waiting(self) -> int:
        return sum(len(one.waiters) for one in self._under_way.values()) + len(self._ready)

    @property
    def busy(self) -> bool:
        return bool(self._under_way or self._ended or self._ready)

    @property
    def futures(self) -> list[Future[None]]:
        return [self._store.next_arrival] if self._under_way else []

    def counters(self) -> dict[str, Any]:
        peers = self._store.report()
        num_connected = sum(peer["connected"] for peer in peers)
        return {"handovers": asdict(self.stats), "peers": peers, "num_connected": num_connected}

    # ---- who waits -------------------------------------------------------------------------

    def start(self, request: Request, now: float, compute_seconds: Callable[[int], float]) -> bool:
        """Whether the request waits from now on: its prompt is asked for, once."""
        if request.was_wanted or request.handover or len(self._under_way) >= MAX_HANDOVERS:
            return False
        tokens = request.tokens(request.num_tokens)
        memory = self._tiers.memory
        num_missing = len(tokens) - memory.probe_prompt(tokens, request.salt)
        if num_missing < MIN_WANTED_TOKENS:
            return False
        one = self._along(tokens, request.salt)
        if one is None:
            one = self._ask(request, tokens, now, compute_seconds(num_missing))
        if one is None:
            return False
        one.waiters.append(request)
        request.was_wanted = True
        request.phase = "loading"
        return True

    def _along(self, tokens: np.ndarray, salt: bytes) -> Handover | None:
        """One that brings just this already."""
        same = (one for one in self._under_way.values() if one.wanted.salt == salt)
        return next((one for one in same if np.array_equal(one.wanted.tokens, tokens)), None)

    def _ask(
        self, request: Request, tokens: np.ndarray, now: float, computing: float
    ) -> Handover | None:
        memory, salt = self._tiers.memory, request.salt
        has_attention = memory.tree.rules.has_attention
        wanted = Wanted(
            next(self._ids),
            tokens.copy(),
            salt,
            held=memory.num_cached(tokens, salt) if has_attention else 0,
            boundaries=request.boundaries,
            priority=request.priority,
        )
        if not self._store.ask(wanted):
            return None
        patience = max(LEAST_PATIENCE, PATIENCE * computing) if computing else FIRST_PATIENCE
        one = Handover(
            wanted,
            memory.lock_tokens(tokens, salt),
            self._tiers.expect(tokens, wanted.held, salt),
            patience,
            began=now,
            deadline=now + patience,
        )
        self._num_named.update(one.keys)
        self._under_way[wanted.id] = one
        self.stats.asked += 1
        return one

    def remove(self, request: Request) -> None:
        """It has ended. What no request waits for is not wanted any more."""
        if request in self._ready:
            self._ready.remove(request)
        for one in [one for one in self._under_way.values() if request in one.waiters]:
            one.waiters.remove(request)
            if not one.waiters:
                self._cancel(one)

    def give_up(self, nbytes: int) -> bool:
        """So many bytes are short: where a lock keeps some of them, the requests that wait compute
        instead, the youngest hand-overs first. Whether any did.

        Several may keep the same bytes, so all are unlocked that it takes; those whose lock changes
        nothing, or that the others make up for, are locked again and go on.
        """
        memory = self._tiers.memory
        wanted = memory.evictable_bytes + nbytes
        unlocked: list[Handover] = []
        for one in reversed(self._under_way.values()):
            if memory.evictable_bytes >= wanted:
                break
            memory.unlock(one.memory_lock)
            unlocked.append(one)
        num_before = self.stats.cancelled
        for one in reversed(unlocked):
            before = memory.evictable_bytes
            path = one.wanted.tokens[: one.memory_lock.length]
            one.memory_lock = memory.lock_tokens(path, one.wanted.salt)
            if memory.evictable_bytes < min(before, wanted):
                self._cancel(one)
        return self.stats.cancelled > num_before

    def take_ready(self) -> list[Request]:
        """Those that need not wait any longer."""
        ready, self._ready = self._ready, []
        for request in ready:
            request.phase = "waiting"
        return ready

    # ---- what arrives ----------------------------------------------------------------------

    def poll(self, now: float) -> None:
        """Take note of what has arrived, and of what is late."""
        for arrived in self._store.take_arrived():
            self._take(arrived, now)
        for one in list(self._under_way.values()):
            if now > min(one.deadline, one.last_deadline):
                self.stats.late += 1
                self._store.cancel(one.wanted.id)
                self._end(one, now)
        self._forget_loaded()

    def _take(self, arrived: Arrived, now: float) -> None:
        one = self._under_way.get(arrived.id)
        if arrived.entry is None:
            if one is not None:
                self.stats.partial += bool(arrived.reason)
                self.stats.arrived += not arrived.reason
                self._end(one, now)
        elif one is None:
            if arrived.entry.key not in self._num_named:
                self._store.forget([arrived.entry.key])
        else:
            self._tiers.arrived(one.wanted.tokens, arrived.entry, one.wanted.salt)
            one.keys.append(arrived.entry.key)
            self._num_named[arrived.entry.key] += 1
            one.deadline = now + one.patience
            self.stats.arrived_bytes += arrived.entry.nbytes

    def _cancel(self, one: Handover) -> None:
        self.stats.cancelled += 1
        self._store.cancel(one.wanted.id)
        self._end(one, None)

    def _end(self, one: Handover, now: float | None) -> None:
        del self._under_way[one.wanted.id]
        self._ended.append(one)
        if now is not None:
            self.stats.waited_seconds += now - one.began
        self._ready += one.waiters
        self._tiers.memory.unlock(one.memory_lock)  # may evict, so it comes last

    def _forget_loaded(self) -> None:
        """What a load has found is locked until that has ended; then memory has it."""
        level = self._tiers.level
        waits = [one for one in self._ended if any(_looks(r, level) for r in one.waiters)]
        for one in self._ended:
            if one in waits:
                continue
            self._num_named.subtract(one.keys)
            unused = [key for key in one.keys if self._num_named[key] <= 0]
            for key in unused:
                self._num_named.pop(key, None)
            self._tiers.below.lose(unused)
            self._store.forget([key for key in unused if not self._tiers.below.is_lost(key)])
        self._ended = waits


def _looks(request: Request, level: int) -> bool:
    """Whether it has yet to look for its prompt in this tier."""
    return request.phase in ("waiting", "loading") and request.tiers_tried <= level
