"""The decode engine's end: connects to prefill engines, asks them for prompts, receives entries,
which the store announces.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from pippin.cache.peer_store import Arrival, PeerStore, Wanted
from pippin.cache.tiers.cache_tier import Format
from pippin.config import PeerAddress
from pippin.engine.peers.connection import (
    BUFFER_BYTES,
    MAX_ENTRY_FRAME_BYTES,
    TO_DECODE,
    Ask,
    Cancel,
    Connection,
    End,
    EntryFrame,
    Facts,
    Memory,
    PeerKeys,
    PeerRefused,
    ToPrefill,
    WireThread,
    reason_of,
)
from pippin.types import Component

CONNECT_SECONDS = 5.0
FIRST_PAUSE = 0.2  # seconds before another attempt; it doubles
LONGEST_PAUSE = 5.0
ROOM_SECONDS = 0.02  # before an entry for which there was no room is tried again

logger = logging.getLogger(__name__)


class PeerLinks:
    """All prefill engines of this one. `start` is called once, when there is a store."""

    def __init__(
        self,
        addresses: Sequence[PeerAddress],
        keys: PeerKeys,
        facts: Facts,
        format: Format,
        max_entry_bytes: int,
    ) -> None:
        self.secret = keys.secret
        self.facts = facts
        self.format = format
        self.max_entry_bytes = max_entry_bytes
        self.thread = WireThread("pippin-peers")
        self._links = [Link(self, one, keys.client if one.is_tls else None) for one in addresses]

    def start(self, store: PeerStore) -> None:
        for link in self._links:
            self.thread.start(link.run(store))

    def ask(self, wanted: Wanted) -> bool:
        """The one that has the fewest tokens to compute."""
        connected = [link for link in self._links if link.connected]
        connected.sort(key=lambda link: link.num_tokens)
        return any(link.ask(wanted) for link in connected)

    def cancel(self, id: str) -> None:
        for link in self._links:
            link.cancel(id)

    def report(self) -> list[dict[str, Any]]:
        return [
            {
                "address": str(link.address),
                "connected": link.connected,
                "shares_memory": link.shares_memory,
                "error": link.error,
            }
            for link in self._links
        ]

    def close(self) -> None:
        self.thread.close()


class Link:
    """One prefill engine. `ask` and `cancel` are called by the engine's thread."""

    def __init__(self, links: PeerLinks, address: PeerAddress, tls: ssl.SSLContext | None) -> None:
        self.address = address
        self.error: str | None = None  # of the last attempt to connect
        self._links = links
        self._tls = tls
        self._wanted: dict[str, Wanted] = {}  # shared by both threads
        self._connection: Connection | None = None
        self._pause = FIRST_PAUSE
        self._lock = threading.Lock()

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def shares_memory(self) -> bool:
        connection = self._connection
        return connection is not None and connection.maps_memory

    @property
    def num_tokens(self) -> int:
        with self._lock:
            return sum(len(wanted.tokens) for wanted in self._wanted.values())

    # ---- the engine's thread ---------------------------------------------------------------

    def ask(self, wanted: Wanted) -> bool:
        with self._lock:
            if self._connection is None:
                return False
            self._wanted[wanted.id] = wanted
        self._write(
            Ask(
                wanted.id,
                wanted.tokens.astype("<i4").tobytes(),
                wanted.salt,
                wanted.held,
                list(wanted.boundaries)[-4096:],
                wanted.priority,
            )
        )
        return True

    def cancel(self, id: str) -> None:
        with self._lock:
            was_wanted = self._wanted.pop(id, None) is not None
        if was_wanted:
            self._write(Cancel(id))

    def _write(self, frame: ToPrefill) -> None:
        def write() -> None:
            if self._connection is not None:
                self._connection.post(frame)

        self._links.thread.call(write)

    # ---- the thread of the connections -----------------------------------------------------

    async def run(self, store: PeerStore) -> None:
        """Connected as long as the other end is there; tried again for ever."""
        while True:
            try:
                await self._connect(store)
            except PeerRefused as error:
                self._report(f"does not fit: {error}")
                self._pause = LONGEST_PAUSE
            except (OSError, asyncio.IncompleteReadError) as error:
                self._report(f"is not connected: {_cause(error)}")
            await asyncio.sleep(self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    async def _connect(self, store: PeerStore) -> None:
        """Returns never: it raises when the connection ends."""
        links, address = self._links, self.address
        with _named_refusals():
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(
                    address.host, address.port, ssl=self._tls, limit=BUFFER_BYTES
                )
        connection = Connection(reader, writer)
        try:
            with _named_refusals():
                await connection.agree(links.facts, links.secret, links.max_entry_bytes, asks=True)
            logger.info("connected to the prefill engine at %s", address)
            self.error, self._pause = None, FIRST_PAUSE
            self._connection = connection
            while True:
                await self._receive(connection, store)
        finally:
            with self._lock:
                self._connection = None
                lost, self._wanted = list(self._wanted), {}
            for id in lost:
                store.end(id, "the prefill engine disconnected")
            connection.close()

    async def _receive(self, connection: Connection, store: PeerStore) -> None:
        frame = await connection.read(TO_DECODE, MAX_ENTRY_FRAME_BYTES)
        if isinstance(frame, Memory):
            if self._tls is not None:
                raise PeerRefused("memory was offered by another machine")
            await connection.map_memory(frame)
            return
        with self._lock:
            wanted = self._wanted.get(frame.id)
            if isinstance(frame, End):
                self._wanted.pop(frame.id, None)
        if isinstance(frame, End):
            if wanted is not None:
                store.end(frame.id, frame.reason)
            return
        if frame.nbytes > self._links.max_entry_bytes:
            raise PeerRefused(
                f"an entry of {frame.nbytes:,} bytes, the limit is {self._links.max_entry_bytes:,}"
            )
        if wanted is None:
            await connection.skip_entry(frame)
        else:
            await self._receive_entry(connection, store, wanted, frame)

    async def _receive_entry(
        self, connection: Connection, store: PeerStore, wanted: Wanted, frame: EntryFrame
    ) -> None:
        """An entry is what this engine's own tokens say it is, or the connection is closed."""
        try:
            component = Component(frame.component)
            fingerprint, format = store.fingerprint, self._links.format
            entry = wanted.entry(fingerprint, format, component, frame.start, frame.end)
        except (ValueError, KeyError) as error:
            raise PeerRefused(f"an entry that does not exist: {error}") from error
        if entry.key.chain != frame.chain or entry.nbytes != frame.nbytes:
            raise PeerRefused(
                f"an entry of {frame.component} with another name or size than tokens "
                f"{frame.start} to {frame.end} of the prompt have"
            )
        arrays = entry.new_buffers()
        await connection.read_entry(frame, arrays)
        while (arrival := store.arrive(wanted.id, entry, arrays, frame.digest)) is Arrival.NO_ROOM:
            await asyncio.sleep(ROOM_SECONDS)  # and what the other end sends next waits as well
            if wanted.id not in self._wanted:  # it was late: the prompt is computed here
                return
        if arrival is Arrival.DAMAGED:
            self.cancel(wanted.id)
            store.end(wanted.id, "an entry was damaged on its way")

    def _report(self, error: str) -> None:
        """Once for each reason."""
        if error != self.error:
            logger.warning("the prefill engine at %s %s", self.address, error)
            self.error = error


@contextlib.contextmanager
def _named_refusals() -> Iterator[None]:
    """Of an end that TLS does not accept, or that is no prefill engine."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise PeerRefused(
            f"its certificate is not accepted ({error.verify_message}): give --peer-ca with the "
            "file of its --peer-cert, and --peer with a name or address of that certificate"
        ) from error
    except (ssl.SSLError, asyncio.IncompleteReadError, ConnectionResetError) as error:
        raise PeerRefused(
            "the connection ended before both had agreed: it has to be the --peer-listen of a "
            "prefill engine, and both addresses have to begin with tcp:// or with tls://"
        ) from error


def _cause(error: OSError | asyncio.IncompleteReadError) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "the connection was closed"
    if isinstance(error, ConnectionRefusedError):
        return "no prefill engine listens there (connection refused); it is tried again"
    if isinstance(error, TimeoutError):
        return f"no connection within {CONNECT_SECONDS:g} seconds; it is tried again"
    return f"{reason_of(error)}; it is tried again"
