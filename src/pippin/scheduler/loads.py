"""Requests that wait for bytes of their prompts: a tier reads them, or another engine sends them.

request ─▶ job ─▶ bytes arrive ─▶ all are there ─▶ its requests are queued again
            └─ late, failed, given up or without requests ─▲
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from pippin.backends.base import Costs, Load, StepPlan
from pippin.cache.entries import Bytes, Key
from pippin.cache.peer_store import Arrived, PeerStore, Wanted
from pippin.cache.prefix_cache import Lock
from pippin.cache.tiers.cache_tier import MIN_BYTES, CacheTier, TierMatch
from pippin.cache.tiers.tier_io import PIECES_AHEAD, Piece, ReadPiece, TierIO
from pippin.scheduler.request import ByteBudget, Request
from pippin.types import Payload

PATIENCE = 2.0  # times what computing should take; then bytes are late
FIRST_PATIENCE = 10.0  # seconds, while it is unknown what computing takes

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class Job:
    tokens: np.ndarray  # int32, up to the end of what is to arrive
    salt: bytes
    memory_lock: Lock  # on what the next bytes connect to
    began: float
    deadline: float
    waiters: dict[Request, int] = field(default_factory=dict)  # and what memory had for them


J = TypeVar("J", bound=Job)


class Waits(Generic[J]):
    def __init__(self, tiers: CacheTier) -> None:
        self._tiers = tiers
        self._jobs: list[J] = []
        self._ready: list[Request] = []  # to be queued again

    @property
    def requests(self) -> list[Request]:
        return [*self._ready, *(request for job in self._jobs for request in job.waiters)]

    @property
    def under_way(self) -> bool:
        """Whether a load may still bring something, also if no request waits for it any more."""
        return bool(self._jobs or self._ready)

    @property
    def busy(self) -> bool:
        """Whether steps are wanted for it although no request runs."""
        return self.under_way

    def remove(self, request: Request) -> None:
        """It has ended. What no request waits for is given up."""
        if request in self._ready:
            self._ready.remove(request)
        for job in [job for job in self._jobs if request in job.waiters]:
            del job.waiters[request]
            if not job.waiters:
                self._cancel(job)

    def take_ready(self, now: float) -> list[Request]:
        """Those that need not wait any longer."""
        ready, self._ready = self._ready, []
        for request in ready:
            request.phase = "waiting"
        return ready

    def _wait(self, request: Request, job: J, in_memory: int) -> bool:
        if job not in self._jobs:
            self._jobs.append(job)
        job.waiters[request] = in_memory
        request.phase = "loading"
        return True

    def _along(self, tokens: np.ndarray, salt: bytes) -> J | None:
        jobs = (job for job in self._jobs if job.salt == salt)
        return next((job for job in jobs if np.array_equal(job.tokens, tokens)), None)

    def _cancel(self, job: J) -> None:
        raise NotImplementedError

    def _end(self, job: J) -> None:
        self._jobs.remove(job)
        self._ready += job.waiters
        self._tiers.memory.unlock(job.memory_lock)  # may evict


def _patience(least: float, computing: float) -> float:
    """Seconds for what would take so long to compute; 0: unknown."""
    return max(least, PATIENCE * computing) if computing else FIRST_PATIENCE


# ---- a tier's store reads ------------------------------------------------------------------------


@dataclass(eq=False)
class Reading:
    """A piece on its way: being read, read, or in a step."""

    piece: Piece
    buffer: Bytes | None  # None: it is used where it lies
    nbytes: int  # claimed for the payload that it becomes
    future: Future[ReadPiece]


@dataclass(eq=False, kw_only=True)
class LoadJob(Job):
    pieces: deque[Piece]
    tier_lock: Lock  # in the tier's tree
    readings: deque[Reading] = field(default_factory=deque)
    in_steps: int = 0
    brought: int = 0  # tokens of the path that are in memory now because of it
    read_seconds: float = 0.0


MAX_JOBS = 8
LEAST_PATIENCE = 0.1  # seconds


class Loads(Waits[LoadJob]):
    def __init__(self, tiers: CacheTier, tier_io: TierIO, costs: Costs, budget: ByteBudget) -> None:
        super().__init__(tiers)
        self._tier_io = tier_io
        self._costs = costs
        self._budget = budget
        self._leftover: list[Reading] = []  # of jobs that ended while the store was reading
        self._steps: dict[int, list[tuple[LoadJob, Reading]]] = {}

    @property
    def claimed_bytes(self) -> int:
        """For payloads that do not exist yet, or are in a step."""
        in_steps = (reading for step in self._steps.values() for _, reading in step)
        waiting = (reading for job in self._jobs for reading in job.readings)
        return sum(reading.nbytes for reading in (*in_steps, *waiting))

    @property
    def under_way(self) -> bool:
        return super().under_way or bool(self._steps)

    @property
    def futures(self) -> Sequence[Future[ReadPiece]]:
        return [reading.future for job in self._jobs for reading in job.readings]

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
        job = self._along(wanted, request.salt)
        job = job or self._begin(
            wanted, request.salt, found, now, compute_seconds(found.num_tokens)
        )
        return job is not None and self._wait(request, job, found.memory_length)

    def _begin(
        self, tokens: np.ndarray, salt: bytes, found: TierMatch, now: float, computing: float
    ) -> LoadJob | None:
        tiers = self._tiers
        waiting = sum(piece.nbytes for job in self._jobs for piece in job.pieces)
        if computing and tiers.rates.seconds(waiting + found.nbytes) >= computing:
            tiers.stats.declined_loads += 1
            tiers.rates.decline()
            return None
        tiers.stats.loads += 1
        self._tier_io.tell(self._tier_io.store.touch, tiers.keys_along(tokens, salt))
        return LoadJob(
            tokens=tokens.copy(),
            salt=salt,
            pieces=deque(found.pieces),
            tier_lock=tiers.cache.lock(found.match),
            memory_lock=tiers.memory.lock_tokens(tokens, salt),
            began=now,
            deadline=now + _patience(LEAST_PATIENCE, computing),
        )

    # ---- steps -----------------------------------------------------------------------------

    def plan(self, step: int, now: float) -> list[Load]:
        """Pieces that have been read, one of each job; others are asked for."""
        self._clear_leftover()
        loads: list[Load] = []
        for job in list(self._jobs):
            if now > job.deadline:
                self._end_late(job, now)
                continue
            if job.readings and job.readings[0].future.done():
                self._take(step, job, loads)
            if job in self._jobs:
                self._read_ahead(job)
        return loads

    def _take(self, step: int, job: LoadJob, loads: list[Load]) -> None:
        reading = job.readings[0]
        try:
            found = reading.future.result()
        except Exception:  # a store counts what a disk does: this is a mistake, and costs a load
            logger.exception("a load failed")
            self._cancel(job)
            return
        if found.lost:
            self._tiers.lose(found.lost, unreadable=True)
            self._cancel(job)
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
                self._cancel(job)
                return
            job.pieces.popleft()
            specs = self._tiers.format(piece.component, piece.num_tokens)
            buffer = self._tier_io.claim_buffer(piece, specs)
            future = self._tier_io.read(piece, specs, buffer)
            job.readings.append(Reading(piece, buffer, nbytes, future))

    def commit(self, step: int, loaded: Iterator[Payload], now: float) -> None:
        """Insert the payloads of this tier's loads in a step into the tree."""
        for job, reading in self._steps.pop(step, ()):
            payload = next(loaded)
            self._release(job, reading)
            if job not in self._jobs:
                payload.release()
                continue
            memory, piece = self._tiers.memory, reading.piece
            place = (job.tokens[: piece.end], piece.component, piece.start)
            found = memory.insert_component(*place, payload, job.salt)
            if not found.inserted or found.length < piece.end:
                self._cancel(job)
                continue
            copy = piece.component, piece.start, piece.end
            self._tiers.note_copies(place[0], [copy], job.salt)
            before, job.memory_lock = job.memory_lock, memory.lock(found)
            memory.unlock(before)  # may evict, so it comes last
            job.brought = max(job.brought, found.length)
            if not job.pieces and not job.readings and not job.in_steps:
                self._succeed(job, now)

    def fail_step(self, step: int) -> None:
        """Its payloads were given up with it."""
        for job, reading in self._steps.pop(step, ()):
            self._release(job, reading)
            if job in self._jobs:
                self._cancel(job)

    def _release(self, job: LoadJob, reading: Reading) -> None:
        job.in_steps -= 1
        self._budget.release(reading.nbytes)
        self._tier_io.release(reading.buffer, reading.future)

    # ---- ends ------------------------------------------------------------------------------

    def give_up(self, nbytes: int) -> bool:
        """All of them: each claims bytes."""
        jobs = list(self._jobs)
        for job in jobs:
            self._cancel(job)
        return bool(jobs)

    def _cancel(self, job: LoadJob) -> None:
        self._tiers.stats.failed_loads += bool(job.waiters)
        self._end(job)

    def _succeed(self, job: LoadJob, now: float) -> None:
        stats = self._tiers.stats
        stats.loaded += 1
        stats.loaded_tokens += len(job.tokens) - min(job.waiters.values())
        self._tiers.rates.observe_rest(max(0.0, now - job.began - job.read_seconds))
        self._end(job)

    def _end_late(self, job: LoadJob, now: float) -> None:
        rates = self._tiers.rates
        self._tiers.stats.late_loads += 1
        waited = now - job.began - job.read_seconds
        reading = job.readings[0] if job.readings else None
        if reading is not None and not reading.future.done() and reading.piece.nbytes >= MIN_BYTES:
            rates.observe_read(reading.piece.nbytes, waited)  # they take longer
        else:
            rates.observe_rest(waited)
        self._end(job)

    def _end(self, job: LoadJob) -> None:
        """No request waits for it any more, and only pieces in a step keep their bytes."""
        self._tiers.cache.unlock(job.tier_lock)
        for reading in job.readings:
            reading.future.cancel()
            self._budget.release(reading.nbytes)
        self._leftover += job.readings
        for request, before in job.waiters.items():
            request.loaded[self._tiers.kind.name] = before, max(before, job.brought)
        super()._end(job)

    def _clear_leftover(self) -> None:
        """Buffers may be used again when the store has stopped writing to them."""
        left, self._leftover = self._leftover, []
        for reading in left:
            if reading.future.done():
                self._tier_io.release(reading.buffer, reading.future)
            else:
                self._leftover.append(reading)


# ---- another engine sends ------------------------------------------------------------------------

MAX_HANDOVERS = 32  # under way; further requests compute their prompts here
LEAST_HANDOVER_PATIENCE = 1.0  # seconds without an arrival
MIN_WANTED_TOKENS = 256  # fewer are computed sooner than asked for
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


@dataclass(eq=False, kw_only=True)
class Handover(Job):
    """Its deadline moves with each arrival."""

    wanted: Wanted
    patience: float
    keys: list[Key]  # that the tier's tree names because of it


class Handovers(Waits[Handover]):
    def __init__(self, tiers: CacheTier, store: PeerStore) -> None:
        super().__init__(tiers)
        self._store = store
        self._ids = (f"handover-{number}" for number in itertools.count())
        self._ended: list[Handover] = []  # whose entries a load may still have to find
        self._num_named: Counter[Key] = Counter()  # by how many of both
        self.stats = HandoverStats()

    @property
    def busy(self) -> bool:
        return super().busy or bool(self._ended)

    @property
    def futures(self) -> Sequence[Future[None]]:
        return [self._store.next_arrival] if self._jobs else []

    def counters(self) -> dict[str, Any]:
        peers = self._store.peers.report()
        num_connected = sum(peer["connected"] for peer in peers)
        return {"handovers": asdict(self.stats), "peers": peers, "num_connected": num_connected}

    def start(self, request: Request, now: float, compute_seconds: Callable[[int], float]) -> bool:
        """Whether the request waits from now on: all of its prompt is asked for, once."""
        if request.was_wanted or request.handover or len(self._jobs) >= MAX_HANDOVERS:
            return False
        tokens = request.tokens(request.num_tokens)
        in_memory = self._tiers.memory.probe_prompt(tokens, request.salt)
        num_missing = len(tokens) - in_memory
        if num_missing < MIN_WANTED_TOKENS:
            return False
        job = self._along(tokens, request.salt)
        job = job or self._ask(request, tokens, now, compute_seconds(num_missing))
        request.was_wanted = job is not None
        return job is not None and self._wait(request, job, in_memory)

    def _ask(
        self, request: Request, tokens: np.ndarray, now: float, computing: float
    ) -> Handover | None:
        memory, salt = self._tiers.memory, request.salt
        has_attention = memory.rules.has_attention
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
        keys = self._tiers.expect(tokens, wanted.held, salt)
        self._num_named.update(keys)
        self.stats.asked += 1
        patience = _patience(LEAST_HANDOVER_PATIENCE, computing)
        return Handover(
            tokens=wanted.tokens,
            salt=salt,
            memory_lock=memory.lock_tokens(tokens, salt),
            began=now,
            deadline=now + patience,
            wanted=wanted,
            patience=patience,
            keys=keys,
        )

    def give_up(self, nbytes: int) -> bool:
        """Where a lock keeps some of these bytes, the youngest hand-overs first.

        Several may keep the same bytes, so all are unlocked that it takes; those whose lock changes
        nothing, or that the others make up for, are locked again and go on.
        """
        memory = self._tiers.memory
        wanted = memory.evictable_bytes + nbytes
        unlocked: list[Handover] = []
        for job in reversed(self._jobs):
            if memory.evictable_bytes >= wanted:
                break
            memory.unlock(job.memory_lock)
            unlocked.append(job)
        num_before = self.stats.cancelled
        for job in reversed(unlocked):
            before = memory.evictable_bytes
            job.memory_lock = memory.lock_tokens(job.tokens[: job.memory_lock.length], job.salt)
            if memory.evictable_bytes < min(before, wanted):
                self._cancel(job)
        return self.stats.cancelled > num_before

    # ---- what arrives ----------------------------------------------------------------------

    def take_ready(self, now: float) -> list[Request]:
        """Takes note of what has arrived, and of what is late."""
        for arrived in self._store.take_arrived():
            self._take(arrived, now)
        for job in list(self._jobs):
            if now > min(job.deadline, job.began + MAX_PATIENCES * job.patience):
                self.stats.late += 1
                self._store.peers.cancel(job.wanted.id)
                self.stats.waited_seconds += now - job.began
                self._end(job)
        self._forget_loaded()
        return super().take_ready(now)

    def _take(self, arrived: Arrived, now: float) -> None:
        job = next((job for job in self._jobs if job.wanted.id == arrived.id), None)
        if arrived.entry is None:
            if job is not None:
                self.stats.partial += bool(arrived.reason)
                self.stats.arrived += not arrived.reason
                self.stats.waited_seconds += now - job.began
                self._end(job)
        elif job is None:
            if arrived.entry.key not in self._num_named:
                self._store.forget([arrived.entry.key])
        else:
            self._tiers.arrived(job.tokens, arrived.entry, job.salt)
            job.keys.append(arrived.entry.key)
            self._num_named[arrived.entry.key] += 1
            job.deadline = now + job.patience
            self.stats.arrived_bytes += arrived.entry.nbytes

    def _cancel(self, job: Handover) -> None:
        self.stats.cancelled += 1
        self._store.peers.cancel(job.wanted.id)
        self._end(job)

    def _end(self, job: Handover) -> None:
        self._ended.append(job)
        super()._end(job)

    def _forget_loaded(self) -> None:
        """What a load has found is locked until that has ended; then memory has it."""
        ended, self._ended = self._ended, []
        for job in ended:
            if any(self._looks(request) for request in job.waiters):
                self._ended.append(job)
                continue
            self._num_named.subtract(job.keys)
            unused = [key for key in job.keys if self._num_named[key] <= 0]
            for key in unused:
                self._num_named.pop(key, None)
            self._tiers.lose(unused)
            self._store.forget([key for key in unused if not self._tiers.is_lost(key)])

    def _looks(self, request: Request) -> bool:
        return request.phase in ("waiting", "loading") and request.tiers_tried <= self._tiers.level
