"""What prefill engines have sent, until it is loaded. Knows no sockets, no tree and no steps.

The verbs are those of a store in the host's memory. Entries arrive in the thread of the connections
(`arrive`, `end`); the engine's thread takes note of them (`take_arrived`), and asks for prompts.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from pippin.cache.entries.entry import Bytes, Entry
from pippin.cache.host.host_store import HostStore
from pippin.cache.peers.wanted import PrefillPeers, Wanted, payload_digest


class Arrival(enum.Enum):
    """What became of an entry that was sent."""

    KEPT = "kept"
    DAMAGED = "damaged"  # it is not what its sender read
    NO_ROOM = "no room"  # for now: every area is being read


class Arrived(NamedTuple):
    """Of one hand-over: an entry; or, without one, its end."""

    id: str
    entry: Entry | None
    reason: str = ""  # of an end: why not all arrived


class PeerStore(HostStore):
    def __init__(
        self,
        max_bytes: int,
        allocate: Callable[[int], Bytes],
        entry_bytes: int,
        fingerprint: bytes,
        peers: PrefillPeers,
    ) -> None:
        super().__init__(max_bytes, allocate, entry_bytes)
        self.fingerprint = fingerprint  # that both engines agreed on
        self._peers = peers
        self._arrived: deque[Arrived] = deque()
        self._next: Future[None] = Future()  # of the next arrival

    # ---- the engine's thread ---------------------------------------------------------------

    def ask(self, wanted: Wanted) -> bool:
        return self._peers.ask(wanted)

    def cancel(self, id: str) -> None:
        self._peers.cancel(id)

    def report(self) -> list[dict[str, Any]]:
        """On each prefill engine."""
        return self._peers.report()

    def close(self) -> None:
        self._peers.close()
        super().close()

    @property
    def next_arrival(self) -> Future[None]:
        """Done as soon as there is something to be taken."""
        return self._next

    def take_arrived(self) -> list[Arrived]:
        """Since the last call, in order."""
        with self._lock:
            arrived = list(self._arrived)
            self._arrived.clear()
            if self._next.done():
                self._next = Future()
        return arrived

    # ---- the thread of the connections -----------------------------------------------------

    def arrive(self, id: str, entry: Entry, data: Sequence[Bytes], digest: bytes) -> Arrival:
        """Keep what was sent. Where there is no room, call again: steps that read end soon."""
        if payload_digest(data) != digest:
            self.count(damaged=1)
            return Arrival.DAMAGED
        if not self.keep(entry, data):
            return Arrival.NO_ROOM
        self._announce(Arrived(id, entry))
        return Arrival.KEPT

    def end(self, id: str, reason: str) -> None:
        """Nothing else arrives of this hand-over."""
        self._announce(Arrived(id, None, reason))

    def _announce(self, arrived: Arrived) -> None:
        with self._lock:
            self._arrived.append(arrived)
            if not self._next.done():
                self._next.set_result(None)
