"""Puts KV events together: the trees of an engine, and where they are announced. Knows no event."""

from __future__ import annotations

from collections.abc import Callable

from pippin.config import ServerConfig
from pippin.engine.kv_events.announcer import Announcer
from pippin.engine.kv_events.event_forms import EventForm
from pippin.engine.kv_events.event_publisher import EventPublisher
from pippin.engine.kv_events.prefix_reports import PrefixReports
from pippin.errors import ConfigError
from pippin.messages import RestorablePrefixes
from pippin.scheduler.scheduler import Scheduler


def announce(config: ServerConfig, scheduler: Scheduler, replica: int = 0) -> Announcer | None:
    """To subscribers from now on, in a thread; None where it is off. Raises ConfigError."""
    if config.kv_events is None:
        return None
    if scheduler.cache is None:
        raise ConfigError(
            "kv_events requires the prefix cache, which is off: remove --kv-events or "
            "--no-prefix-cache"
        )
    publisher = EventPublisher(config.kv_events, config.kv_events_replay)
    form = EventForm(config.kv_events_form, scheduler.cache.tree.rules, replica)
    return _start(Announcer(form, publisher), scheduler)


def report_prefixes(
    scheduler: Scheduler, send: Callable[[RestorablePrefixes], None]
) -> Announcer | None:
    """To the server, which routes requests by it; None without a prefix cache."""
    if scheduler.cache is None:
        return None
    reports = PrefixReports(scheduler.cache.tree.rules, send)
    return _start(Announcer(reports, reports), scheduler)


def _start(announcer: Announcer, scheduler: Scheduler) -> Announcer:
    assert scheduler.cache is not None
    announcer.observe("memory", scheduler.cache.tree)
    for tier, _ in scheduler.tiers:
        if tier.kind.name != "peer":  # what prefill engines sent is on its way into memory
            announcer.observe(tier.kind.name, tier.below.cache.tree, salted=False)
    announcer.start()
    return announcer
