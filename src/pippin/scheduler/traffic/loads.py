"""Requests that wait for a part of their prompt from a tier below. Knows no arrays and no slots.

    queue ──▶ loading: read a piece ─▶ a step makes a payload of it ─▶ the tree takes it ──▶ queue
                       └─ the next ones are read meanwhile

A load is started where it should be faster than computing. One that fails, that turns out slower,
or whose bytes are wanted by running replies is given up, and its requests compute what is missing.
What it has loaded by then stays in the tree.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np

from pippin.backends.base import Costs, Load, StepPlan
from pippin.cache.tiers.cache_tier import CacheTier, TierMatch
from pippin.cache.tiers.tier_io import PIECES_AHEAD, ReadPiece, TierIO
from pippin.scheduler.memory.byte_budget import ByteBudget
from pippin.scheduler.request import Request
from pippin.scheduler.traffic.load_jobs import LoadJob, Reading
from pippin.types import Payload

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
            tier_lock=tiers.below.cache.lock(match),
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
                self._tiers.below.lose(found.lost, unreadable=True)
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
        self._tiers.below.cache.unlock(job.tier_lock)
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
