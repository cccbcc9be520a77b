"""What an engine can restore, reported to its own server, which routes by it. Knows no sockets.

A model that restores at checkpoints only has blocks at whose end it can (the group ENDS); of others
every block is such an end. The hash of a block covers all tokens before it: ends are all it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from pippin.cache.tree.components import Rules
from pippin.engine.kv_events.block_index import ENDS, KV, Removed, Stored
from pippin.messages import RestorablePrefixes

Change = Stored | Removed | None  # None: nothing is cached any more


class PrefixReports:
    """A form and a publisher of an Announcer in one."""

    cleared: Change = None

    def __init__(self, rules: Rules, send: Callable[[RestorablePrefixes], None]) -> None:
        self._group = ENDS if rules.has_state or rules.has_window else KV
        self._send = send

    def events(self, tier: str, changes: Iterable[Stored | Removed]) -> list[Change]:
        return [change for change in changes if change.group == self._group]

    def batch(self, seconds: float, events: list[Change]) -> RestorablePrefixes:
        stored = [each.hashes for each in events if isinstance(each, Stored)]
        removed = [each.hashes for each in events if isinstance(each, Removed)]
        return RestorablePrefixes(
            list(chain.from_iterable(stored)), list(chain.from_iterable(removed)), None in events
        )

    def publish(self, batch: RestorablePrefixes) -> None:
        self._send(batch)

    def answer(self) -> None:
        """The channel loses nothing: there is nothing to send again."""

    def close(self) -> None:
        """The channel is closed by the process that has it."""
