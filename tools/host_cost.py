"""What planning costs the host, on the toy backend: large trees, long queues, many streams.

    python tools/host_cost.py

Prints medians and the worst, in milliseconds of CPU time, of a plan and of a commit. The device
takes no time here: the numbers are the scheduler's alone (`cache_cost.py` has the cache's).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median

sys.path[:0] = [str(Path(__file__).parent.parent / "tests")]

import numpy as np  # noqa: E402

from builders import make_scheduler  # noqa: E402
from pippin.backends.fake import FakeBackend, FakePayload  # noqa: E402
from pippin.messages import Submit, pack_tokens  # noqa: E402
from pippin.scheduler.scheduler import Scheduler  # noqa: E402
from pippin.types import GRID, Component, SamplingParams  # noqa: E402

A, W, S = Component.ATTENTION, Component.WINDOW, Component.STATE
NUM_RUNNING, NUM_WAITING, NUM_NODES = 256, 1_000, 100_000
NODES_PER_PATH = 50
STEPS = 40
NUM_LONG, LONG_PROMPT = 100, 30_000


def fill(scheduler: Scheduler, backend: FakeBackend, num_nodes: int) -> np.ndarray:
    """Paths of 50 blocks; returns the tokens of the last one."""
    cache = scheduler.cache
    assert cache is not None
    rng = np.random.default_rng(0)
    length = NODES_PER_PATH * GRID
    for _ in range(num_nodes // NODES_PER_PATH):
        tokens = rng.integers(0, 50_000, length).astype(np.int32)
        for end in range(GRID, length + 1, GRID):
            kv = {
                c: FakePayload(GRID, GRID * 64, backend.ledger, [0] * GRID)
                for c in backend.spec.components
                if c in (A, W)
            }
            states = (
                {end: FakePayload(1, 6400, backend.ledger, [0])} if backend.spec.state_bytes else {}
            )
            cache.insert(tokens[:end], end - GRID, kv, states)
    return tokens


def make(components: tuple[Component, ...], capacity_bytes: int) -> tuple[Scheduler, FakeBackend]:
    backend = FakeBackend(components=components, num_slots=NUM_RUNNING, max_len=1 << 20)
    scheduler = make_scheduler(
        backend, num_slots=NUM_RUNNING, chunk=8192, capacity_bytes=capacity_bytes, max_queue=4096
    )
    return scheduler, backend


def submit(scheduler: Scheduler, name: str, tokens: list[int], max_tokens: int = 5_000) -> None:
    scheduler.add(Submit(name, pack_tokens(tokens), SamplingParams(max_tokens=max_tokens, temperature=0.0)))


class Clock:
    def __init__(self, scheduler: Scheduler, backend: FakeBackend) -> None:
        self._scheduler, self._backend = scheduler, backend
        self.plans: list[float] = []
        self.commits: list[float] = []

    def step(self) -> int:
        began = time.thread_time()
        plan = self._scheduler.plan()
        self.plans.append(time.thread_time() - began)
        if plan is None:
            return 0
        result = self._backend.launch(plan).wait()
        began = time.thread_time()
        self._scheduler.commit(plan.step, result)
        self.commits.append(time.thread_time() - began)
        return len(plan.admit)

    def show(self, what: str) -> None:
        plans, commits = ([1e3 * s for s in spent] for spent in (self.plans, self.commits))
        print(
            f"{what:66s} plan {median(plans):6.2f} (worst {max(plans):6.2f})"
            f"   commit {median(commits):6.2f} (worst {max(commits):6.2f})"
        )


def steady(components: tuple[Component, ...]) -> None:
    names = "+".join(c.value for c in components)
    scheduler, backend = make(components, 1 << 40)
    tokens = fill(scheduler, backend, NUM_NODES)
    for number in range(NUM_RUNNING):
        submit(scheduler, f"run{number}", [number, number + 1, number + 2])
    clock = Clock(scheduler, backend)
    started = clock.step()
    clock.show(f"{names}: {started} short prompts start in one step")
    for number in range(NUM_WAITING):
        submit(scheduler, f"wait{number}", [*tokens[: 20 * GRID].tolist(), number])
    clock = Clock(scheduler, backend)
    for _ in range(STEPS):
        clock.step()
    clock.show(f"{names}: {NUM_NODES:,} nodes, {NUM_RUNNING} run, {NUM_WAITING:,} wait for a slot")


def short_of_bytes(components: tuple[Component, ...]) -> None:
    """Long prompts wait, each with a long match, and none of them fits beside those that run."""
    names = "+".join(c.value for c in components)
    scheduler, backend = make(components, 1 << 40)
    tokens = fill(scheduler, backend, NUM_NODES)
    cache = scheduler.cache
    assert cache is not None
    for number in range(NUM_RUNNING // 2):
        submit(scheduler, f"run{number}", [number, number + 1, number + 2])
    Clock(scheduler, backend).step()
    long = [*tokens.tolist(), *np.arange(LONG_PROMPT).tolist()]
    need = backend.row_bytes(len(long))
    scheduler.budget.capacity = scheduler.budget.claimed + need
    cache.set_capacity(need)
    scheduler.budget.claim(need // 2)
    for number in range(NUM_LONG):
        submit(scheduler, f"wait{number}", [*long, number], 100)
    clock = Clock(scheduler, backend)
    for _ in range(STEPS):
        clock.step()
    running = scheduler.num_running
    clock.show(f"{names}: {running} run, {NUM_LONG} prompts of {len(long):,} tokens do not fit")



def main() -> int:
    for components in ((A, S), (A,), (A, W)):
        steady(components)
    short_of_bytes((A, S))
    return 0


if __name__ == "__main__":
    sys.exit(main())
