"""What happens to a row whose restored prefix turned out to be damaged. Knows no plans."""

from __future__ import annotations

from pippin.backends.base import Costs, Damage
from pippin.cache.prefix_cache import PrefixCache
from pippin.scheduler.holding import Holding
from pippin.scheduler.registry import Registry


def take_back(
    holding: Holding, damage: Damage, costs: Costs, cache: PrefixCache | None, registry: Registry
) -> None:
    """What the row was restored from is not what it was: it is dropped, with all that was computed
    on it, and its request runs those tokens itself."""
    holding.tainted = holding.damaged = True
    if not holding.released and not costs.restores_by_reference:
        holding.unlock(cache)
    if cache is not None:
        tokens = holding.request.tokens(damage.end)
        cache.condemn(tokens, damage.component, damage.start, holding.request.salt)
    if holding.runs and not holding.retracting:
        registry.retract(holding)
