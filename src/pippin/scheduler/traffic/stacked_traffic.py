"""Several tiers below memory, the fastest first: host, then disk. Knows no more of them than that.

Each has a tree, rates and spills of its own, and each takes what it lacks from memory: what the
device gives up is in the host's memory by then, and what that gives up is on disk. A request looks
for its prompt in the first, waits for what is there, and then looks for more in the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pippin.backends.base import Costs, Load, Spill, StepResult
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tiers.courier import Courier
from pippin.cache.tiers.tiers import Tiers
from pippin.scheduler.budget import ByteBudget
from pippin.scheduler.planning.admission import Admission
from pippin.scheduler.request import Request
from pippin.scheduler.traffic.base import NoTraffic, Traffic
from pippin.scheduler.traffic.tier_traffic import TierTraffic, wait_for_any
from pippin.types import TierName


class StackedTraffic:
    def __init__(self, tiers: Sequence[TierTraffic]) -> None:
        assert [traffic.tiers.level for traffic in tiers] == list(range(len(tiers)))
        self.tiers = tuple(tiers)
        # Of a step that spills or loads something, how many of each are of which tier.
        self._shares: dict[int, list[tuple[int, int]]] = {}

    @property
    def busy(self) -> bool:
        return any(traffic.busy for traffic in self.tiers)

    @property
    def num_loading(self) -> int:
        return sum(traffic.num_loading for traffic in self.tiers)

    @property
    def loads_under_way(self) -> bool:
        return any(traffic.loads_under_way for traffic in self.tiers)

    @property
    def claimed_bytes(self) -> int:
        return sum(traffic.claimed_bytes for traffic in self.tiers)

    def start_loads(
        self, admission: Admission, compute_seconds: Callable[[int], float]
    ) -> list[Request]:
        changed: dict[Request, None] = {}  # one may come back from a tier and wait for the next
        for traffic in self.tiers:
            changed |= dict.fromkeys(traffic.start_loads(admission, compute_seconds))
        return list(changed)

    def remove(self, request: Request) -> None:
        for traffic in self.tiers:
            traffic.remove(request)

    def give_up_loads(self) -> bool:
        gave_up = [traffic.give_up_loads() for traffic in self.tiers]
        return any(gave_up)

    def note(self, request: Request, length: int) -> None:
        for traffic in self.tiers:
            traffic.note(request, length)

    def plan(self, step: int) -> tuple[tuple[Spill, ...], tuple[Load, ...]]:
        """All loads first: what one tier loads may evict what another is to write."""
        loads = [traffic.plan_loads(step) for traffic in self.tiers]
        spills = [traffic.plan_spills(step) for traffic in self.tiers]
        if any(spills) or any(loads):
            sizes = zip(spills, loads, strict=True)
            self._shares[step] = [(len(spill), len(load)) for spill, load in sizes]
        return tuple(itertools.chain(*spills)), tuple(itertools.chain(*loads))

    def commit(self, step: int, result: StepResult) -> None:
        spilled, loaded = result.spilled, result.loaded
        for traffic, (num_spills, num_loads) in self._take(step):
            own = replace(result, spilled=spilled[:num_spills], loaded=loaded[:num_loads])
            spilled, loaded = spilled[num_spills:], loaded[num_loads:]
            traffic.commit(step, own)
        assert not spilled
        assert not loaded

    def fail_step(self, step: int) -> None:
        for traffic, _ in self._take(step):
            traffic.fail_step(step)

    def _take(self, step: int) -> list[tuple[TierTraffic, tuple[int, int]]]:
        shares = self._shares.pop(step, None)
        return [] if shares is None else list(zip(self.tiers, shares, strict=True))

    def wait(self, seconds: float) -> bool:
        return wait_for_any([f for traffic in self.tiers for f in traffic.futures], seconds)

    def hurry(self) -> bool:
        has_more = [traffic.hurry() for traffic in self.tiers]
        return any(has_more)

    def flush(self) -> Mapping[TierName, int]:
        freed: dict[TierName, int] = {}
        for traffic in self.tiers:
            freed |= traffic.flush()
        return freed

    def check_when_idle(self) -> None:
        for traffic in self.tiers:
            traffic.check_when_idle()

    def counters(self) -> Mapping[TierName, dict[str, Any]]:
        counted: dict[TierName, dict[str, Any]] = {}
        for traffic in self.tiers:
            counted |= traffic.counters()
        return counted

    def close(self) -> None:
        for traffic in self.tiers:
            traffic.close()


def make_traffic(
    tiers: Sequence[tuple[Tiers, Courier]],
    costs: Costs,
    budget: ByteBudget,
    cache: PrefixCache | None,
) -> Traffic:
    """`tiers`: the fastest first; none: what memory has no room for is lost."""
    flows = [TierTraffic(*tier, costs, budget) for tier in tiers]
    if len(flows) > 1:
        return StackedTraffic(flows)
    return flows[0] if flows else NoTraffic(cache)
