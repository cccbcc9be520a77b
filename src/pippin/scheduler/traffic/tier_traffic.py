"""What flows between memory and one tier below, step by step: loads that requests wait for, spills.

Knows steps and clocks; what to write and what to read is for `cache/tiers` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict
from time import perf_counter
from typing import Any

from pippin.backends.base import Costs, Load, Spill, StepResult
from pippin.cache.tiers.courier import Courier
from pippin.cache.tiers.tiers import Tiers
from pippin.scheduler.budget import ByteBudget
from pippin.scheduler.planning.admission import Admission
from pippin.scheduler.request import Request
from pippin.scheduler.traffic.loads import Loads
from pippin.scheduler.traffic.spills import Spills
from pippin.types import TierName

MAX_LOST = 64  # keys that the tree learns of in one step

Clock = Callable[[], float]


class TierTraffic:
    """The `Traffic` of an engine with one tier below memory."""

    def __init__(
        self,
        tiers: Tiers,
        courier: Courier,
        costs: Costs,
        budget: ByteBudget,
        clock: Clock = perf_counter,
    ) -> None:
        self.tiers = tiers
        self.courier = courier
        self.clock = clock
        self.loads = Loads(tiers, courier, costs, budget)
        self.spills = Spills(tiers, courier)
        self._steps: set[int] = set()  # that spill or load something

    @property
    def busy(self) -> bool:
        return self.loads.busy or self.spills.busy(self.clock())

    @property
    def num_loading(self) -> int:
        return self.loads.num_waiting

    @property
    def loads_under_way(self) -> bool:
        return self.loads.busy

    @property
    def claimed_bytes(self) -> int:
        return self.loads.claimed_bytes

    def start_loads(
        self, admission: Admission, compute_seconds: Callable[[int], float]
    ) -> list[Request]:
        """Each request is looked up once, after it was looked up in all faster tiers."""
        back = self.loads.take_back()
        for request in back:
            admission.add(request)
        now = self.clock()
        new = [r for r in admission.considered() if r.tiers_tried == self.tiers.level]
        waiting: list[Request] = []
        for request in new:
            if not request.wants_prompt_logprobs and self.loads.seek(request, now, compute_seconds):
                admission.remove(request)
                waiting.append(request)
        return [*back, *waiting]

    def remove(self, request: Request) -> None:
        self.loads.remove(request)

    def give_up_loads(self) -> bool:
        return self.loads.give_up()

    def note(self, request: Request, length: int) -> None:
        self.spills.note(request.id, request.tokens(length).copy(), request.salt)

    def plan(self, step: int) -> tuple[tuple[Spill, ...], tuple[Load, ...]]:
        load = self.plan_loads(step)
        return self.plan_spills(step), load

    def plan_loads(self, step: int) -> tuple[Load, ...]:
        """They claim bytes, and so may evict: before any spill of the step is planned."""
        now = self.clock()
        self.spills.poll(now)
        self._tidy()
        load = self.loads.plan(step, now)
        if load:
            self._steps.add(step)
        return load

    def plan_spills(self, step: int) -> tuple[Spill, ...]:
        spill = self.spills.plan(step, self.clock())
        if spill:
            self._steps.add(step)
        return spill

    def commit(self, step: int, result: StepResult) -> None:
        if step in self._steps:
            self._steps.remove(step)
            self.spills.commit(step, result.spilled, self.clock())
            self.loads.commit(step, result.loaded, self.clock())

    def fail_step(self, step: int) -> None:
        if step in self._steps:
            self._steps.remove(step)
            self.spills.fail_step(step, self.clock())
            self.loads.fail_step(step)

    @property
    def futures(self) -> list[Future[Any]]:
        """Of what steps can take in when it is done."""
        return [*self.loads.futures, *self.spills.futures]

    def wait(self, seconds: float) -> bool:
        return wait_for_any(self.futures, seconds)

    def hurry(self) -> bool:
        if self.tiers.kind.outlives:
            return self.spills.hurry()
        self.spills.forget()  # nobody will read it
        return False

    def flush(self) -> Mapping[TierName, int]:
        before = self.tiers.below.cache.nbytes
        self.spills.forget()
        self.tiers.flush()
        self._tidy()
        return {self.tiers.kind.name: before - self.tiers.below.cache.nbytes}

    def check_when_idle(self) -> None:
        self.tiers.below.cache.check_when_idle()

    def close(self) -> None:
        """What is being written is written; what was asked for is not waited for."""
        self.courier.close()
        self.courier.store.close()

    def counters(self) -> Mapping[TierName, dict[str, Any]]:
        store = asdict(self.courier.store.counters())
        counted = self.tiers.counters() | {"loading": self.loads.num_waiting, "store": store}
        return {self.tiers.kind.name: counted}

    def _tidy(self) -> None:
        """Some of it: an evicted segment may hold very many entries, and every stream waits."""
        store = self.courier.store
        self.tiers.below.lose(store.take_lost(MAX_LOST))
        unused = self.tiers.below.remove_lost()
        if unused:
            self.courier.tell(store.forget, unused)


def wait_for_any(futures: Sequence[Future[Any]], seconds: float) -> bool:
    if futures:
        wait(futures, seconds, FIRST_COMPLETED)
    return bool(futures)
