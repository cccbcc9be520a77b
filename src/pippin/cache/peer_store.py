"""A prompt that a decode engine asks a prefill engine for, and the stores of both.

The decode engine names every entry itself, by its own tokens: what arrives says which component and
which tokens it is, and its chain key has to be the one that follows from these.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from pippin.cache.entries import (
    Bytes,
    Chain,
    Destination,
    Entry,
    EntryStore,
    Key,
    Place,
    check_sizes,
    views,
)
from pippin.cache.host_store import HostStore
from pippin.cache.tiers.cache_tier import Format
from pippin.types import Component

DIGEST_BYTES = 16


@dataclass(frozen=True, eq=False)
class Wanted:
    id: str  # of the hand-over, unique on the decode engine
    tokens: np.ndarray = field(repr=False)  # int32: the whole prompt
    salt: bytes
    held: int  # tokens whose attention KV the decode engine has: not to be sent
    boundaries: tuple[int, ...] = ()  # where messages end
    priority: int = 0

    @cached_property
    def nbytes(self) -> int:
        return int(self.tokens.nbytes)

    def entry(
        self, fingerprint: bytes, format: Format, component: Component, start: int, end: int
    ) -> Entry:
        """The entry of a component of [start, end). ValueError: there is none such in it."""
        num_tokens = end - start if component.divides else 0
        if not 0 <= start <= end <= len(self.tokens) or not end or num_tokens < component.divides:
            raise ValueError(f"tokens {start} to {end} of a prompt of {len(self.tokens)}")
        chain = Chain(fingerprint, self.salt)
        if start:
            chain = chain.extended(self.tokens[:start])
        tokens = self.tokens[start:end]
        return Entry(
            Key(chain.extended(tokens).key if end > start else chain.key, component, num_tokens),
            chain.key,
            start,
            tokens.tobytes(),
            format(component, num_tokens or 1),
        )


class PrefillPeers(Protocol):
    """The engines that compute prompts for this one. No verb blocks."""

    def ask(self, wanted: Wanted) -> bool:
        """Ask one of them; False if none is connected. What comes of it, the store announces."""
        ...

    def cancel(self, id: str) -> None:
        """It is not wanted any more."""
        ...

    def report(self) -> list[dict[str, Any]]:
        """For each of them, its address and whether it is connected."""
        ...

    def close(self) -> None: ...


class DecodePeer(Protocol):
    """An engine that asked for a prompt."""

    def send(self, id: str, entry: Entry, data: Sequence[Bytes], digest: bytes) -> bool:
        """Whether it was sent; blocks while the connection is slower than the caller."""
        ...

    def end(self, id: str, reason: str) -> None:
        """Nothing else is sent of this hand-over. `reason`: why not all was; "" if all was."""
        ...


def payload_digest(data: Sequence[Bytes]) -> bytes:
    """Of all arrays of an entry."""
    digest = xxhash.xxh3_128()
    for view in views(data):
        digest.update(view)
    return digest.digest()


class OutgoingStore(EntryStore[Place]):
    """Keeps nothing: what is written is sent."""

    def __init__(self, id: str, peer: DecodePeer, fingerprint: bytes) -> None:
        super().__init__(fingerprint, max_bytes=0)
        self._id = id
        self._peer = peer

    def __contains__(self, key: Key) -> bool:
        return True

    def write(self, entry: Entry, data: Sequence[Bytes]) -> bool:
        check_sizes(entry, data)
        return self._peer.send(self._id, entry, data, payload_digest(data))

    def read(self, keys: Sequence[Key], into: Sequence[Destination]) -> list[bool]:
        return [False for _ in keys]


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
        """`fingerprint`: that both engines agreed on."""
        super().__init__(max_bytes, allocate, entry_bytes, fingerprint)
        self.peers = peers
        self._arrived: deque[Arrived] = deque()
        self._next: Future[None] = Future()  # of the next arrival

    # ---- the engine's thread ---------------------------------------------------------------

    def close(self) -> None:
        self.peers.close()
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
