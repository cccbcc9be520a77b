"""A store that sends what is written to it, and keeps nothing. Knows no sockets and no tree.

One for each prompt that a decode engine asked for: it is the other end of that engine's
`PeerStore`. What was sent counts as kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pippin.cache.entries.entry import Bytes, Entry, Key, Loaded
from pippin.cache.entries.entry_store import Destination, StoreCounters, check_sizes
from pippin.cache.peers.wanted import DecodePeer, payload_digest


class OutgoingStore:
    def __init__(self, id: str, peer: DecodePeer, fingerprint: bytes) -> None:
        self.fingerprint = fingerprint
        self._id = id
        self._peer = peer

    def entries(self) -> Sequence[Entry]:
        return ()

    def __contains__(self, key: Key) -> bool:
        return True

    def write(self, entry: Entry, data: Sequence[Bytes]) -> bool:
        check_sizes(entry, data)
        return self._peer.send(self._id, entry, data, payload_digest(data))

    def read(
        self, keys: Sequence[Key], into: Sequence[Destination] | None = None
    ) -> list[Loaded | None]:
        return [None for _ in keys]

    def touch(self, keys: Iterable[Key]) -> None:
        pass

    def forget(self, keys: Iterable[Key]) -> None:
        pass

    def take_lost(self, limit: int | None = None) -> list[Key]:
        return []

    def flush(self) -> None:
        pass

    def counters(self) -> StoreCounters:
        return StoreCounters()

    def close(self) -> None:
        pass
