"""Puts KV events together: the trees of an engine, and where they are announced. Knows no event."""

from __future__ import annotations

from pippin.config import ServerConfig
from pippin.engine.kv_events.announcer import Announcer
from pippin.engine.kv_events.event_forms import EventForm
from pippin.engine.kv_events.event_publisher import EventPublisher
from pippin.errors import ConfigError
from pippin.scheduler.scheduler import Scheduler


def announce(config: ServerConfig, scheduler: Scheduler) -> Announcer | None:
    """From now on, in a thread; None where it is off. Raises ConfigError."""
    if config.kv_events is None:
        return None
    if scheduler.cache is None:
        raise ConfigError(
            "kv_events requires the prefix cache, which is off: remove --kv-events or "
            "--no-prefix-cache"
        )
    tree = scheduler.cache.tree
    publisher = EventPublisher(config.kv_events, config.kv_events_replay)
    announcer = Announcer(EventForm(config.kv_events_form, tree.rules), publisher)
    announcer.observe("memory", tree)
    for tier, _ in scheduler.tiers:
        if tier.kind.name != "peer":  # what prefill engines sent is on its way into memory
            announcer.observe(tier.kind.name, tier.below.cache.tree, salted=False)
    announcer.start()
    return announcer
