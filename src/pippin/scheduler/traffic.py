"""Moves made-up payloads through steps before a request's prefix is moved. Knows no tree, no store.

On GPUs the first copy of a size pins memory of the host, and the first step that spills or loads
has kernels loaded and memory of the device allocated: streams would wait for it. So payloads of
zeros are loaded from a tier's buffer, spilled again, and a made-up prompt is restored from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any

import numpy as np

from pippin.backends.base import (
    Admit,
    Backend,
    Costs,
    DecodeRow,
    Load,
    PrefillRow,
    Restore,
    Retire,
    Spill,
    StepPlan,
    StepResult,
)
from pippin.backends.warm_up import More
from pippin.cache.peer_store import PeerStore
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tiers.cache_tier import CacheTier
from pippin.cache.tiers.tier_io import TierIO
from pippin.scheduler.admission import Admission
from pippin.scheduler.loads import Handovers, Loads
from pippin.scheduler.request import ByteBudget, Request
from pippin.scheduler.spills import Pushes, Spills
from pippin.types import GRID, Component, Payload, SamplingParams, TierName

LEAST_BYTES = 1 << 20  # of a copy: pinned memory for less is allocated in blocks of this size
NUM_AT_ONCE = 2  # copies of the largest size, of a load each
SLOT = 1


@dataclass(frozen=True)
class TierWarmUp:
    backend: Backend
    tier_io: TierIO
    batch_bytes: int  # of the largest copy

    def run(self, steps: Iterator[int], can_hold: Callable[[int], bool]) -> None:
        """Sizes halve from one to the next: memory is pinned in powers of two. Only while no slot
        is held; what does not fit is passed over."""
        spec = self.backend.spec
        per_token = max(spec.kv_bytes_per_token, spec.window_bytes_per_token, 1)
        most = max(1, min(self.batch_bytes // per_token, spec.max_len - GRID - 2))
        most -= most % GRID if most > GRID else 0  # where prefixes end on the grid, too
        lengths = [most >> n for n in range(most.bit_length()) if most >> n]
        lengths = [n for n in lengths if n == most or n * per_token >= LEAST_BYTES]
        for number, length in enumerate(lengths):
            num_loads = NUM_AT_ONCE if number == 0 else 1
            if not can_hold((1 + num_loads) * self.backend.row_bytes(length + GRID + 2)):
                continue
            made: list[dict[Component, Payload]] = []
            try:
                for _ in range(num_loads):
                    made += [self._load(length, steps)]
                self._spill(made, steps)
                if number == 0:
                    self._restore(length, made[0], steps)
            finally:
                for payload in (payload for payloads in made for payload in payloads.values()):
                    payload.release()

    def _load(self, num_tokens: int, steps: Iterator[int]) -> dict[Component, Payload]:
        spec, buffers = self.backend.spec, self.tier_io.buffers
        lengths = {
            Component.ATTENTION: num_tokens,
            Component.WINDOW: min(num_tokens, spec.window),
        }
        loads, claimed = [], []
        try:
            for component in spec.components:
                length = lengths.get(component, 1)
                specs = self.backend.payload_arrays(component, length)
                ends = [*accumulate((one.nbytes for one in specs), initial=0)]
                buffer = buffers.claim(ends[-1])
                claimed.append(buffer)
                buffer[: ends[-1]] = 0
                arrays = tuple(buffer[start:end] for start, end in pairwise(ends))
                loads.append(Load(component, length, arrays))
            result = self._launch(StepPlan(next(steps), load=tuple(loads)))
        finally:
            for buffer in claimed:
                buffers.release(buffer)
        return dict(zip(spec.components, result.loaded, strict=True))

    def _spill(self, made: Sequence[dict[Component, Payload]], steps: Iterator[int]) -> None:
        """All at once: each waits in pinned memory of its own."""
        spills = [Spill(kind, (payload,)) for one in made for kind, payload in one.items()]
        result = self._launch(StepPlan(next(steps), spill=tuple(spills)))
        try:
            for spilled in result.spilled:
                spilled.arrays()
        finally:
            for spilled in result.spilled:
                spilled.release()

    def _restore(
        self, length: int, payloads: dict[Component, Payload], steps: Iterator[int]
    ) -> None:
        """A prompt that is restored whole, where hidden vectors are kept, and one that goes on."""
        for num_more in (0, GRID) if Component.HIDDEN in payloads else (GRID,):
            given = {kind: (payload,) for kind, payload in payloads.items()}
            if num_more:
                given.pop(Component.HIDDEN, None)
            restore = Restore(length, given)
            prompt = np.zeros(length + num_more, dtype=np.int32)
            greedy = SamplingParams(temperature=0.0)
            row = PrefillRow(SLOT, length, prompt[length:], samples=True, restore=restore)
            admit = (Admit(SLOT, greedy, (), prompt, seed=SLOT),)
            try:
                self._launch(StepPlan(next(steps), admit=admit, prefill=(row,)))
                self._launch(StepPlan(next(steps), decode=(DecodeRow(SLOT, len(prompt)),)))
            finally:
                self._launch(StepPlan(next(steps), retire=(Retire(SLOT),)))

    def _launch(self, plan: StepPlan) -> StepResult:
        pending = self.backend.launch(plan)
        try:
            return pending.wait()
        except Exception:
            pending.discard()
            raise


MAX_LOST = 64  # keys that the tree learns of in one step
MAX_FLUSHED = 128  # nodes that were flushed and are freed in one step: some milliseconds


@dataclass(frozen=True)
class TierTraffic:
    tiers: CacheTier
    tier_io: TierIO
    loads: Loads
    spills: Spills
    handovers: Handovers | None = None  # None: it has what this engine wrote

    @property
    def waits(self) -> tuple[Loads | Handovers, ...]:
        """What requests wait for, the first that may serve them first."""
        return (self.loads,) if self.handovers is None else (self.handovers, self.loads)

    def remove_lost(self) -> None:
        """Some of it: an evicted segment may hold very many entries, and every stream waits."""
        unused = self.tiers.remove_lost(MAX_LOST)
        if unused:
            self.tier_io.tell(self.tier_io.store.forget, unused)


class Traffic:
    """What moves between memory, the tiers below it and other engines. One thread calls."""

    def __init__(
        self,
        tiers: Sequence[tuple[CacheTier, TierIO]],
        costs: Costs,
        budget: ByteBudget,
        cache: PrefixCache | None,
        pushes: Pushes | None = None,
    ) -> None:
        self.pushes = pushes  # to decode engines
        self.clock: Callable[[], float] = perf_counter
        self.tiers: tuple[TierTraffic, ...] = ()
        above: Spills | None = None  # of the slowest tier so far that this engine writes
        for one, tier_io in tiers:
            is_written = one.kind.max_bytes_written > 0
            spills = Spills(one, tier_io, above if is_written else None)
            loads = Loads(one, tier_io, costs, budget)
            store = tier_io.store
            handovers = Handovers(one, store) if isinstance(store, PeerStore) else None
            self.tiers += (TierTraffic(one, tier_io, loads, spills, handovers),)
            above = spills if is_written else above
        assert all(tier.tiers.level == level for level, tier in enumerate(self.tiers))
        self.waits = [source for tier in self.tiers for source in tier.waits]
        self._handovers = [tier.handovers for tier in self.tiers if tier.handovers is not None]
        self.moves = bool(self.tiers) or pushes is not None
        self._trees = [] if cache is None else [cache]
        self._trees += [tier.tiers.cache for tier in self.tiers]
        self.flushing = False  # something that was flushed has not been freed yet

    def warm_ups(self, backend: Backend) -> list[More]:
        """What a device with a memory of its own is to do before it moves payloads of requests."""
        if backend.device.unified or not backend.warm_up_seconds:
            return []
        return [
            TierWarmUp(backend, tier.tier_io, tier.tiers.batch_bytes).run for tier in self.tiers
        ]

    @property
    def busy(self) -> bool:
        """Whether steps are wanted although no request runs."""
        if any(source.busy for source in self.waits):
            return True
        if self.pushes is not None and self.pushes.busy:
            return True
        return bool(self.tiers) and any(t.spills.busy(self.clock()) for t in self.tiers)

    @property
    def loads_under_way(self) -> bool:
        return any(source.under_way for source in self.waits)

    @property
    def loading(self) -> list[Request]:
        """Those that wait for a load."""
        return [request for source in self.waits for request in source.requests]

    @property
    def num_received(self) -> int | None:
        """Prompts that prefill engines computed, whole; None if there are none."""
        return sum(h.stats.arrived for h in self._handovers) if self._handovers else None

    @property
    def num_sent(self) -> int | None:
        """Prompts to decode engines, whole; None if none can ask for them."""
        return None if self.pushes is None else self.pushes.stats.sent

    @property
    def claimed_bytes(self) -> int:
        return sum(tier.loads.claimed_bytes for tier in self.tiers)

    # ---- requests --------------------------------------------------------------------------

    def start_loads(
        self, admission: Admission, compute_seconds: Callable[[int], float]
    ) -> list[Request]:
        """Requests that a tier can serve faster than the model wait for it, out of the queue; those
        whose load has ended are queued again. Returns all of these.

        Each request is looked up once in a tier, after it was looked up in all faster ones.
        """
        changed: dict[Request, None] = {}  # a load may end in a tier and another start in the next
        now = self.clock()
        for tier in self.tiers:
            for request in [r for source in tier.waits for r in source.take_ready(now)]:
                admission.add(request)
                changed[request] = None
            for request in admission.considered():
                if request.tiers_tried != tier.tiers.level or request.wants_prompt_logprobs:
                    continue
                if any(s.start(request, now, compute_seconds) for s in tier.waits):
                    admission.remove(request)
                    changed[request] = None
        return list(changed)

    def remove(self, request: Request) -> None:
        """A request that waits for a load has ended."""
        for source in self.waits:
            source.remove(request)

    def give_up(self, shortage: Callable[[], int]) -> None:
        """While bytes are short, requests that wait for them compute instead: loads, which claim
        some, then hand-overs that keep some."""
        for source in sorted(self.waits, key=lambda source: source in self._handovers):
            if (nbytes := shortage()) > 0:
                source.give_up(nbytes)

    def note(self, request: Request, length: int, whole: bool) -> None:
        """The tree in memory holds so much of a request's tokens, and keeps it for a while.

        `whole`: all of its prompt, or of its reply. Tiers wait for that; a decode engine does not.
        """
        if self.pushes is not None:
            self.pushes.note(request, length)
        for tier in self.tiers[:1] if whole else ():  # it passes on to the next
            if tier.tiers.kind.max_bytes_written:
                tier.spills.note(request.id, request.tokens(length).copy(), request.salt)

    # ---- steps -----------------------------------------------------------------------------

    def plan(self, step: int) -> tuple[tuple[Spill, ...], tuple[Load, ...]]:
        """For the end of a step's plan: nothing may leave the tree between this and the launch.

        All loads first: they claim bytes, and so may evict what a tier is to write.
        """
        now = self.clock()
        loads: list[Load] = []
        spills: list[Spill] = []
        for tier in self.tiers:
            tier.spills.poll(now)
            tier.remove_lost()
            loads += tier.loads.plan(step, now)
        for tier in self.tiers:
            spills += tier.spills.plan(step, now)
        if self.pushes is not None:
            spills += self.pushes.plan(step, now)
        return tuple(spills), tuple(loads)

    def commit(self, step: int, result: StepResult) -> None:
        now = self.clock()
        spilled, loaded = iter(result.spilled), iter(result.loaded)  # in the order of the tiers
        for tier in self.tiers:
            tier.spills.commit(step, spilled, now)
            tier.loads.commit(step, loaded, now)
        if self.pushes is not None:
            self.pushes.commit(step, spilled, now)
        assert next(spilled, None) is None
        assert next(loaded, None) is None

    def fail_step(self, step: int) -> None:
        for tier in self.tiers:
            tier.spills.fail_step(step, self.clock())
            tier.loads.fail_step(step)
        if self.pushes is not None:
            self.pushes.fail_step(step, self.clock())

    # ---- between steps ---------------------------------------------------------------------

    def wait(self, seconds: float) -> bool:
        spills = [tier.spills for tier in self.tiers]
        pushes = [] if self.pushes is None else [self.pushes]
        futures: list[Future[Any]] = []
        for one in (*self.waits, *spills, *pushes):
            futures += one.futures
        if futures:
            wait(futures, seconds, FIRST_COMPLETED)
        return bool(futures)

    def hurry(self) -> bool:
        """Let no spill wait any longer; whether there is anything to be written."""
        has_more = False
        for tier in self.tiers:
            if tier.tiers.kind.outlives:
                has_more |= tier.spills.hurry()
            else:
                tier.spills.pass_all_on()
        return has_more

    def flush(self) -> Mapping[TierName, int]:
        """No match returns what no lock protects any more, in any tier; the bytes of each one below
        memory that `free_flushed` is to free."""
        if self.pushes is not None:
            self.pushes.forget()
        for tier in self.tiers:
            tier.spills.flush()
        for tree in self._trees:
            tree.flush()
        self.flushing = any(tree.flushing for tree in self._trees)
        return {t.tiers.kind.name: t.tiers.cache.evictable_bytes for t in self.tiers}

    def free_flushed(self) -> None:
        """Some of it, in all tiers together: every stream waits."""
        left = MAX_FLUSHED
        for tree in self._trees:
            left -= tree.free_flushed(left)
        if left < MAX_FLUSHED:
            for tier in self.tiers:
                tier.remove_lost()
        self.flushing = any(tree.flushing for tree in self._trees)

    def counters(self) -> Mapping[TierName, dict[str, Any]]:
        """Of each tier below memory."""
        return {
            tier.tiers.kind.name: tier.tiers.counters()
            | {
                "loading": len(tier.loads.requests),
                "store": asdict(tier.tier_io.store.counters()),
            }
            | ({} if tier.handovers is None else tier.handovers.counters())
            for tier in self.tiers
        }

    def close(self) -> None:
        """Writes under way end first; reads that were asked for are not waited for."""
        for tier in self.tiers:
            tier.tier_io.close()
        for tier in self.tiers:  # a tier may have been read for the one below it
            tier.tier_io.store.close()
