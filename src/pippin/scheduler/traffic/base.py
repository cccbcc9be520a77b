"""What a scheduler asks of the tiers below memory, and what is answered where there are none.

Knows no tier: `tier_traffic.py` knows one, `stacked_traffic.py` how several lie upon each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pippin.backends.base import Load, Spill, StepResult
from pippin.cache.prefix_cache import PrefixCache
from pippin.scheduler.planning.admission import Admission
from pippin.scheduler.request import Request
from pippin.types import TierName


class Traffic(Protocol):
    """Loads that requests wait for, and spills, step by step. One thread calls."""

    @property
    def busy(self) -> bool:
        """Whether steps are wanted although no request runs."""
        ...

    @property
    def num_loading(self) -> int:
        """Requests that wait for a load, out of the queue."""
        ...

    @property
    def loads_under_way(self) -> bool:
        """Whether something is being loaded, also if nobody waits for it any more."""
        ...

    @property
    def claimed_bytes(self) -> int:
        """Of the budget, for what is being loaded."""
        ...

    def start_loads(
        self, admission: Admission, compute_seconds: Callable[[int], float]
    ) -> list[Request]:
        """Those that the tier below can serve faster than the model wait for it, out of the queue;
        those that need not wait any longer come back. Returns all of these."""
        ...

    def remove(self, request: Request) -> None:
        """One that waits for a load has ended."""
        ...

    def give_up_loads(self) -> bool:
        """Bytes are short: whoever waits for a load computes instead. Whether anybody did."""
        ...

    def note(self, request: Request, length: int) -> None:
        """The tree in memory holds so much of a request's tokens, and keeps it for a while."""
        ...

    def plan(self, step: int) -> tuple[tuple[Spill, ...], tuple[Load, ...]]:
        """For the end of a step's plan: nothing may leave the tree between this and the launch."""
        ...

    def commit(self, step: int, result: StepResult) -> None: ...

    def fail_step(self, step: int) -> None: ...

    def wait(self, seconds: float) -> bool:
        """For something to be done that steps can take in; False if nothing is under way."""
        ...

    def hurry(self) -> bool:
        """Let no spill wait any longer; whether there is anything to be written."""
        ...

    def flush(self) -> Mapping[TierName, int]:
        """Empty all tiers of what nobody holds; the bytes that left each of those below memory."""
        ...

    def check_when_idle(self) -> None: ...

    def counters(self) -> Mapping[TierName, dict[str, Any]]:
        """Of each tier below memory."""
        ...

    def close(self) -> None: ...


class NoTraffic:
    """What memory has no room for is lost."""

    busy = False
    num_loading = 0
    loads_under_way = False
    claimed_bytes = 0

    def __init__(self, cache: PrefixCache | None) -> None:
        self._cache = cache

    def start_loads(
        self, admission: Admission, compute_seconds: Callable[[int], float]
    ) -> list[Request]:
        return []

    def remove(self, request: Request) -> None:
        raise AssertionError(f"{request.id} waits for a load, and there is no tier to load from")

    def give_up_loads(self) -> bool:
        return False

    def note(self, request: Request, length: int) -> None:
        pass

    def plan(self, step: int) -> tuple[tuple[Spill, ...], tuple[Load, ...]]:
        return (), ()

    def commit(self, step: int, result: StepResult) -> None:
        pass

    def fail_step(self, step: int) -> None:
        pass

    def wait(self, seconds: float) -> bool:
        return False

    def hurry(self) -> bool:
        return False

    def flush(self) -> Mapping[TierName, int]:
        if self._cache is not None:
            self._cache.flush()
        return {}

    def check_when_idle(self) -> None:
        pass

    def counters(self) -> Mapping[TierName, dict[str, Any]]:
        return {}

    def close(self) -> None:
        pass
