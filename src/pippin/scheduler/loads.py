"""A load in progress: what is still to be read, what has been, and which requests wait for it."""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from pippin.backends.base import Costs, Load, StepPlan
from pippin.cache.entries import Bytes, Key
from pippin.cache.peer_store import Arrived, PeerStore, Wanted
from pippin.cache.prefix_cache import Lock
from pippin.cache.tiers.cache_tier import CacheTier, TierMatch
from pippin.cache.tiers.tier_io import PIECES_AHEAD, Piece, ReadPiece, TierIO
from pippin.scheduler.request import ByteBudget, Request
from pippin.types import Payload


@dataclass(eq=False)
class Reading:
    """A piece on its way: being read, read, or in a step."""

    piece: Piece
    buffer: Bytes | None  # None: it is used where it lies
    nbytes: int  # claimed for the payload that it becomes
    future: Future[ReadPiece]


@dataclass(eq=False)
class LoadJob:
    """One load, for one or more requests."""

    tokens: np.ndarray  # int32, up to the end of the match there
    salt: bytes
    pieces: deque[Piece]
    tier_lock: Lock  # in the tier's tree
    memory_lock: Lock  # on what the next piece connects to
    began: float
    deadline: float
    waiters: dict[Request, int] = field(default_factory=dict)  # and what memory had for them
    readings: deque[Reading] = field(default_factory=deque)
    in_steps: int = 0
    brought: int = 0  # tokens of the path that are in memory now because of it
    read_seconds: float = 0.0
    ended: bool = False


MAX_JOBS = 8
LEAST_PATIENCE = 0.1  # seconds
PATIENCE = 2.0  # times what computing should take; then a load is late
FIRST_PATIENCE = 10.0  # seconds, while it is unknown what computing takes

logger = logging.getLogger(__name__)


class Loads:
    def __init__(self, tiers: CacheTier, tier_io: TierIO, costs: Costs, budget: ByteBudget) -> None:
        self._tiers = tiers
        self._tier_io = tier_io
        self._costs = costs
        self._budget = budget
        self._jobs: list[LoadJob] = []
        self._leftover: list[Reading] = []  # of jobs that ended while the store was reading
        self._steps: dict[int, list[tuple[LoadJob, Reading]]] = {}
        self._ready: list[Request] = []  # to be queued again

    @property
    def num_waiting(self) -> int:
        return sum(len(job.waiters) for job in self._jobs) + len(self._ready)

    @property
    def claimed_bytes(self) -> int:
        """For payloads that do not exist yet, or are in a step."""
        in_steps = (reading for step in self._steps.values() for _, reading in step)
        waiting = (reading for job in self._jobs for reading in job.readings)
        return sum(reading.nbytes for reading in (*in_steps, *waiting))

    @property
    def busy(self) -> bool:
        return bool(self._jobs or self._steps or self._ready)

    @property
    def futures(self) -> list[Future[ReadPiece]]:
        return [reading.future for job in self._jobs for reading in job.readings]

    # ---- who waits -------------------------------------------------------------------------

    def start(self, request: Request, now: float, compute_seconds: Callable[[int], float]) -> bool:
        """Whether the request waits from now on. `compute_seconds`: of tokens; 0 if unknown."""
        if len(self._jobs) >= MAX_JOBS:
            return False
        tokens = request.tokens(request.num_tokens)
        found = self._tiers.find(tokens, request.salt)
        request.tiers_tried = self._tiers.level + 1
        if found is None:
            return False
        wanted = tokens[: found.match.length]
        job = self._job_along(wanted, request.salt)
        job = job or self._begin(wanted, request.salt, found, now, compute_seconds)
        if job is None:
            return False
        job.waiters[request] = found.memory_length
        request.phase = "loading"
        return True

    def _job_along(self, tokens: np.ndarray, salt: bytes) -> LoadJob | None:
        """A load that brings just this already."""
        jobs = (job for job in self._jobs if job.salt == salt)
        return next((job for job in jobs if np.array_equal(job.tokens, tokens)), None)

    def _begin(
        self,
        tokens: np.ndarray,
        salt: bytes,
        found: TierMatch,
        now: float,
        compute_seconds: Callable[[int], float],
    ) -> LoadJob | None:
        tiers, match = self._tiers, found.match
        computing = compute_seconds(found.num_tokens)
        waiting = sum(piece.nbytes for job in self._jobs for piece in job.pieces)
        if computing and tiers.rates.seconds(waiting + found.nbytes) >= computing:
            tiers.stats.declined_loads += 1
            tiers.rates.decline()
            return None
        patience = max(LEAST_PATIENCE, PATIENCE * computing) if computing else FIRST_PATIENCE
        job = LoadJob(
            tokens.copy(),
            salt,
            deque(found.pieces),
            tier_lock=tiers.cache.lock(match),
            memory_lock=tiers.memory.lock_tokens(tokens, salt),
            began=now,
            deadline=now + patience,
        )
        self._jobs.append(job)
        tiers.stats.loads += 1
        self._tier_io.tell(self._tier_io.store.touch, tiers.keys_along(job.tokens, salt))
        return job

    def remove(self, request: Request) -> None:
        """It has ended. A load without requests is given up."""
        if request in self._ready:
            self._ready.remove(request)
        for job in [job for job in self._jobs if request in job.waiters]:
            del job.waiters[request]
            if not job.waiters:
                self._end(job)

    def take_ready(self) -> list[Request]:
        """Those that need not wait any longer."""
        ready, self._ready = self._ready, []
        for request in ready:
            request.phase = "waiting"
        return ready

    # ---- steps -----------------------------------------------------------------------------

    def plan(self, step: int, now: float) -> tuple[Load, ...]:
        """Pieces that have been read, one of each job; others are asked for."""
        self._clear_leftover()
        loads: list[Load] = []
        for job in list(self._jobs):
            if now > job.deadline:
                self._end_late(job, now)
                continue
            if job.readings and job.readings[0].future.done():
                self._take(step, job, loads)
            if not job.ended:
                self._read_ahead(job)
        return tuple(loads)

    def _take(self, step: int, job: LoadJob, loads: list[Load]) -> None:
        reading = job.readings[0]
        found = _result(reading.future)
        if found is None or found.lost:
            if found is not None:
                self._tiers.lose(found.lost, unreadable=True)
            self._fail(job)
            return
        job.readings.popleft()
        job.in_steps += 1
        job.read_seconds += found.seconds
        self._tiers.rates.observe_read(reading.piece.nbytes, found.seconds)
        self._tiers.stats.loaded_bytes += reading.piece.nbytes
        loads.append(Load(reading.piece.component, reading.piece.num_tokens, found.arrays))
        self._steps.setdefault(step, []).append((job, reading))

    def _read_ahead(self, job: LoadJob) -> None:
        while job.pieces and len(job.readings) + job.in_steps < PIECES_AHEAD:
            piece = job.pieces[0]
            probe = Load(piece.component, piece.num_tokens, ())
            nbytes = self._costs.transient_bytes(StepPlan(0, load=(probe,)))
            if not self._budget.claim(nbytes):
                self._fail(job)
                return
            job.pieces.popleft()
            specs = self._tiers.format(piece.component, piece.num_tokens)
            buffer = self._tier_io.claim_buffer(piece, specs)
            future = self._tier_io.read(piece, specs, buffer)
            job.readings.append(Reading(piece, buffer, nbytes, future))

    def commit(self, step: int, loaded: Iterator[Payload], now: float) -> None:
        """Insert the payloads of this tier's loads in a step into the tree."""
        for job, reading in self._steps.pop(step, []):
            payload = next(loaded)
            self._release(job, reading)
            if job.ended:
                payload.release()
                continue
            memory, piece = self._tiers.memory, reading.piece
            place = (job.tokens[: piece.end], piece.component, piece.start)
            found = memory.insert_component(*place, payload, job.salt)
            if not found.inserted or found.length < piece.end:
                self._fail(job)
                continue
            self._tiers.note_copy(*place, job.salt)
            before, job.memory_lock = job.memory_lock, memory.lock(found)
            memory.unlock(before)  # may evict, so it comes last
            job.brought = max(job.brought, found.length)
            if not job.pieces and not job.readings and not job.in_steps:
                self._succeed(job, now)

    def fail_step(self, step: int) -> None:
        """Its payloads were given up with it."""
        for job, reading in self._steps.pop(step, []):
            self._release(job, reading)
            if not job.ended:
                self._fail(job)

    def _release(self, job: LoadJob, reading: Reading) -> None:
        job.in_steps -= 1
        self._budget.release(reading.nbytes)
        self._tier_io.release(reading.buffer, reading.future)

    # ---- ends ------------------------------------------------------------------------------

    def give_up(self) -> bool:
        """Bytes are short: requests that wait compute instead. Whether any did."""
        jobs = [job for job in self._jobs if not job.ended]
        for job in jobs:
            self._fail(job)
        return bool(jobs)

    def _fail(self, job: LoadJob) -> None:
        self._tiers.stats.failed_loads += 1
        self._end(job)

    def _succeed(self, job: LoadJob, now: float) -> None:
        stats = self._tiers.stats
        stats.loaded += 1
        stats.loaded_tokens += len(job.tokens) - min(job.waiters.values())
        self._tiers.rates.observe_rest(max(0.0, now - job.began - job.read_seconds))
        self._end(job)

    def _end_late(self, job: LoadJob, now: float) -> None:
        stats, rates = self._tiers.stats, self._tiers.rates
        stats.late_loads += 1
        waited = now - job.began - job.read_seconds
        if job.readings and not job.readings[0].future.done():
            rates.observe_late(job.readings[0].piece.nbytes, waited)
        else:
            rates.observe_rest(waited)
        self._end(job)

    def _end(self, job: LoadJob) -> None:
        """No request waits for it any more, and only pieces in a step keep their bytes."""
        assert not job.ended
        job.ended = True
        self._jobs.remove(job)
        self._tiers.cache.unlock(job.tier_lock)
        self._tiers.memory.unlock(job.memory_lock)
        for reading in job.readings:
            reading.future.cancel()
            self._budget.release(reading.nbytes)
            self._leftover.append(reading)
        job.readings.clear()
        for request, before in job.waiters.items():
            request.note_load(self._tiers.kind.name, before, job.brought)
            self._ready.append(request)
        job.waiters.clear()

    def _clear_leftover(self) -> None:
        """Buffers may be used again when the store has stopped writing to them."""
        done = [reading for reading in self._leftover if reading.future.done()]
        for reading in done:
            self._tier_io.release(reading.buffer, reading.future)
        self._leftover = [reading for reading in self._leftover if reading not in done]


def _result(future: Future[ReadPiece]) -> ReadPiece | None:
    try:
        return future.result()
    except Exception:  # a store counts what a disk does: this is a mistake, and costs a load
        logger.exception("a load failed")
        return None


MIN_WANTED_TOKENS = 256  # fewer are computed sooner than asked for
MAX_HANDOVERS = 32  # under way; further requests compute their prompts here
LEAST_HANDOVER_PATIENCE = 1.0  # seconds without an arrival
HANDOVER_PATIENCE = 2.0  # times what computing should take here; then it is late
FIRST_HANDOVER_PATIENCE = 10.0  # seconds, while it is unknown what computing takes
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
        peers = self._store.peers.report()
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
        if not self._store.peers.ask(wanted):
            return None
        patience = (
            max(LEAST_HANDOVER_PATIENCE, HANDOVER_PATIENCE * computing)
            if computing
            else FIRST_HANDOVER_PATIENCE
        )
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
                self._store.peers.cancel(one.wanted.id)
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
        self._store.peers.cancel(one.wanted.id)
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
            self._tiers.lose(unused)
            self._store.forget([key for key in unused if not self._tiers.is_lost(key)])
        self._ended = waits


def _looks(request: Request, level: int) -> bool:
    """Whether it has yet to look for its prompt in this tier."""
    return request.phase in ("waiting", "loading") and request.tiers_tried <= level
