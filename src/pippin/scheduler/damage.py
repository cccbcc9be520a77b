"""What happens to a row whose restored prefix turned out to be damaged. Knows no plans."""

from __future__ import annotations

from pippin.backends.base import Costs, Damage
from pippin.cache.prefix_cache import PrefixCache
from pippin.scheduler.registry import Registry
from pippin.scheduler.running_slot import RunningSlot


def take_back(
    running: RunningSlot,
    damage: Damage,
    costs: Costs,
    cache: PrefixCache | None,
    registry: Registry,
) -> None:
    """What the row was restored from is not what it was: it is dropped, with all that was computed
    on it, and its request runs those tokens itself."""
    running.tainted = running.damaged = True
    if not running.released and not costs.restores_by_reference:
        running.unlock(cache)
    if cache is not None:
        tokens = running.request.tokens(damage.end)
        cache.condemn(tokens, damage.component, damage.start, running.request.salt)
    if running.runs and not running.preempting:
        registry.preempt(running)
