"""A tier with very many nodes whose store evicts whole segments while streams run.

A real scheduler on the toy backend, for `tools/simulate.py`, which measures what a step costs then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from builders import make_scheduler
from memory_store import MemoryStore
from pippin.backends.fake import FakeBackend
from pippin.cache.entries import Entry, Key
from pippin.cache.tiers.cache_tier import CacheTier, Run
from pippin.messages import Submit, pack_tokens
from pippin.types import GRID, Component, SamplingParams
from simulator import Workers

A, S, H = Component.ATTENTION, Component.STATE, Component.HIDDEN
NUM_SEGMENTS = 16  # of a full store on disk
NUM_STREAMS = 8
BRANCHES = 16  # of one prefix; each is three nodes long


class SegmentedStore(MemoryStore):
    """Has names of entries and no bytes, and evicts the entries of a sixteenth of them together."""

    def __init__(self) -> None:
        super().__init__(b"segments", 1 << 60)
        self._names: dict[Key, None] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._names

    def name(self, entry: Entry) -> None:
        self._names[entry.key] = None

    def evict_segment(self, num_entries: int) -> None:
        for key in list(self._names)[:num_entries]:
            del self._names[key]
            self._lost.append(key)


@dataclass
class EvictedSegments:
    """Steps of an engine after each of some segments was evicted."""

    num_nodes: int

    def __post_init__(self) -> None:
        backend = FakeBackend(components=(A, S), num_slots=NUM_STREAMS, max_len=1 << 20)
        self.store, self.workers = SegmentedStore(), Workers()
        self.scheduler = make_scheduler(
            backend, num_slots=NUM_STREAMS, store=self.store, workers=self.workers
        )
        self.backend = backend
        (self.flow,) = self.scheduler.traffic.tiers
        self._fill(self.flow.tiers)
        for number in range(NUM_STREAMS):
            params = SamplingParams(max_tokens=1 << 19, temperature=0.0, ignore_eos=True)
            self.scheduler.add(Submit(f"stream {number}", pack_tokens([number, 1, 2]), params))
        for _ in range(4):
            self.step(lambda plan: plan())

    def _fill(self, tiers: CacheTier) -> None:
        """Prefixes of one block, branches of three: states at all ends, hidden vectors at some."""
        rng = np.random.default_rng(0)
        below = tiers
        while below.cache.radix.num_nodes < self.num_nodes:
            prefix = rng.integers(0, 50_000, GRID).astype(np.int32)
            for _ in range(BRANCHES):
                branch = rng.integers(0, 50_000, 3 * GRID).astype(np.int32)
                path = np.concatenate([prefix, branch])
                for end in range(GRID, len(path) + 1, GRID):
                    for component in (A, S, H):
                        start = end - GRID if component is A else end
                        (entry,) = below.entries(path, [Run(component, start, end, ())])
                        below.add(path, [entry])
                        self.store.name(entry)

    def run(self, num_segments: int, measure: Callable[[Callable[[], object]], None]) -> int:
        """Evicts so many segments, one after the other; returns the number of steps."""
        below, num_steps = self.flow.tiers, 0
        num_entries = len(below._owned) // NUM_SEGMENTS
        for _ in range(num_segments):
            self.store.evict_segment(num_entries)
            while self.store._lost or below._lost:
                self.step(measure)
                num_steps += 1
        assert len(below._owned) <= len(self.store._names), "the tree names what was evicted"
        return num_steps

    def step(self, measure: Callable[[Callable[[], object]], None]) -> None:
        """One of an engine, of which `measure` runs what concerns the tier."""
        traffic = self.scheduler.traffic
        planned: list[object] = []
        real = traffic.plan

        def plan(step: int) -> object:
            measure(lambda: planned.append(real(step)))
            return planned[0]

        traffic.plan = plan  # type: ignore[method-assign, assignment]
        try:
            launched = self.scheduler.plan()
        finally:
            traffic.plan = real  # type: ignore[method-assign]
        assert launched is not None
        self.scheduler.commit(launched.step, self.backend.launch(launched).wait())
        self.workers.advance(9)


def percentiles(seconds: Sequence[float]) -> str:
    median, late, worst = (1e3 * float(np.quantile(seconds, q)) for q in (0.5, 0.99, 1.0))
    return f"median {median:.2f} ms, p99 {late:.2f} ms, max {worst:.2f} ms"
