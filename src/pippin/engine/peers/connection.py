"""Frames and payloads on one connection, and how it is opened. Knows no requests and no entries.

Whatever the other end sends is bounded before it is read: frames by a limit that the caller gives,
payloads by the sizes that this end expects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from pippin.cache.entries import blocks
from pippin.cache.entries.entry import Bytes
from pippin.engine.peers.agreement import Facts, difference, is_proof, prove
from pippin.engine.peers.shared_memory import IncomingMemory, OutgoingMemory
from pippin.engine.peers.wire_frames import (
    LENGTH_BYTES,
    MAX_HANDSHAKE_BYTES,
    NONCE_BYTES,
    PROTOCOL,
    EntryFrame,
    Frame,
    Hello,
    Mapped,
    Memory,
    Opening,
    Proof,
    Refusal,
    Taken,
    limited,
)
from pippin.errors import PippinError

READ_BYTES = 256 << 10  # of a payload at a time
WRITE_BYTES = 1 << 20
BUFFER_BYTES = 1 << 20
HANDSHAKE_SECONDS = 10.0
# A cable that is cut ends no connection: the kernel sends again for a quarter of an hour. Platforms
# lack some of these; macOS calls the first one TCP_KEEPALIVE.
PROBES = {"TCP_KEEPIDLE": 4, "TCP_KEEPALIVE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}  # seconds
PROBES |= {"TCP_USER_TIMEOUT": 10_000}  # milliseconds without an acknowledgement

Message = TypeVar("Message")
logger = logging.getLogger(__name__)


class PeerRefused(PippinError):
    """The two ends do not fit together, or the other one does not keep to the protocol."""

    code = "peer_refused"


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        notice_lost_peer(writer.get_extra_info("socket"))
        self._sending = asyncio.Lock()  # a frame and its payload lie together
        self.max_entry_bytes = 0  # that the other end accepts
        self._offered: OutgoingMemory | None = None
        self._outgoing: OutgoingMemory | None = None  # once the other end has mapped it
        self._incoming: IncomingMemory | None = None
        self._room = asyncio.Event()  # in the memory, or it is too late

    # ---- frames ----------------------------------------------------------------------------

    async def read(self, decoder: msgspec.msgpack.Decoder[Message], max_bytes: int) -> Message:
        """PeerRefused: it is too large, or not a message of the expected types."""
        nbytes = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
        if nbytes > max_bytes:
            raise PeerRefused(f"a frame of {nbytes:,} bytes, the limit is {max_bytes:,}")
        try:
            return decoder.decode(await self._reader.readexactly(nbytes))
        except msgspec.MsgspecError as error:
            raise PeerRefused(f"a frame is not a message: {error}") from error

    async def read_payload(self, arrays: Sequence[Bytes]) -> None:
        for view in blocks.views(arrays):
            at = 0
            while at < len(view):
                data = await self._reader.read(min(READ_BYTES, len(view) - at))
                if not data:
                    raise asyncio.IncompleteReadError(b"", len(view) - at)
                view[at : at + len(data)] = data
                at += len(data)

    async def skip_payload(self, nbytes: int) -> None:
        while nbytes:
            data = await self._reader.read(min(READ_BYTES, nbytes))
            if not data:
                raise asyncio.IncompleteReadError(b"", nbytes)
            nbytes -= len(data)

    async def write(self, frame: Frame, payload: Sequence[Bytes] = ()) -> None:
        body = msgspec.msgpack.encode(frame)
        async with self._sending:
            self._writer.write(len(body).to_bytes(LENGTH_BYTES, "little") + body)
            for view in blocks.views(payload):
                for at in range(0, len(view), WRITE_BYTES):
                    self._writer.write(view[at : at + WRITE_BYTES])
                    await self._writer.drain()
            await self._writer.drain()

    def close(self) -> None:
        """What was written is sent first, unless the task is cancelled: then its thread ends."""
        self._drop_offer()
        self._room.set()
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            self._writer.transport.abort()
        else:
            self._writer.close()

    def abort(self) -> None:
        """At once, also where the other end answers nothing."""
        self._writer.transport.abort()

    # ---- payloads, in memory that both ends have mapped if there is any --------------------

    async def offer_memory(self) -> None:
        """Once. Until the other end has mapped it, payloads follow their frames."""
        try:
            self._offered = OutgoingMemory()
        except OSError as error:
            logger.info("no memory is shared with a decode engine: %s", error)
        else:
            await self.write(Memory(self._offered.name, self._offered.nbytes, self._offered.token))

    def take_answer(self, answer: Mapped) -> None:
        if answer.is_mapped:
            self._outgoing = self._offered
        self._drop_offer()

    def _drop_offer(self) -> None:
        if self._offered is not None:
            self._offered.remove_name()
            self._offered = None

    async def map_memory(self, offer: Memory) -> None:
        if self._incoming is not None:
            raise PeerRefused("memory was offered twice")
        try:
            self._incoming = IncomingMemory(offer.name, offer.nbytes, offer.token)
        except OSError as error:
            logger.info("no memory is shared with a prefill engine: %s", error)
        await self.write(Mapped(self._incoming is not None))

    @property
    def maps_memory(self) -> bool:
        return self._incoming is not None

    async def write_entry(self, frame: EntryFrame, payload: Sequence[Bytes]) -> None:
        """One at a time."""
        memory = self._outgoing
        if memory is None or not 0 < frame.nbytes <= memory.nbytes:
            await self.write(frame, payload)
            return
        while (at := memory.place(frame.nbytes)) is None:
            self._room.clear()
            await self._room.wait()
            if self._writer.is_closing():
                raise ConnectionResetError("closed while a payload waited for room")
        memory.write(at, payload)
        await self.write(msgspec.structs.replace(frame, at=at))

    def free(self, taken: Taken) -> None:
        if self._outgoing is None or not self._outgoing.free(taken.end):
            raise PeerRefused("memory was taken that held nothing")
        self._room.set()

    async def read_entry(self, frame: EntryFrame, arrays: Sequence[Bytes]) -> None:
        """`arrays` have room for `nbytes`."""
        if frame.at is None:
            await self.read_payload(arrays)
            return
        if self._incoming is None or not self._incoming.read(frame.at, arrays):
            raise PeerRefused(f"no payload of {frame.nbytes:,} bytes is in memory at {frame.at}")
        await self.write(Taken(frame.at + frame.nbytes))

    async def skip_entry(self, frame: EntryFrame) -> None:
        if frame.at is None:
            await self.skip_payload(frame.nbytes)
        else:
            await self.write(Taken(frame.at + frame.nbytes))

    # ---- how it is opened ------------------------------------------------------------------

    async def agree(self, facts: Facts, secret: bytes, max_entry_bytes: int, *, asks: bool) -> None:
        """Both ends prove that they know the secret and compare facts. `asks`: this one is the
        decode engine's. Raises PeerRefused."""
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await self._agree(facts, secret, max_entry_bytes, asks=asks)
        except TimeoutError as error:
            raise PeerRefused(f"no agreement within {HANDSHAKE_SECONDS:g} seconds") from error
        except PeerRefused as error:
            if not error.message.startswith(REFUSED_US):
                with contextlib.suppress(OSError):  # then it has disconnected
                    await self.write(Refusal(limited(error.message)))
            raise

    async def _agree(
        self, facts: Facts, secret: bytes, max_entry_bytes: int, *, asks: bool
    ) -> None:
        own = secrets.token_bytes(NONCE_BYTES)
        hello, proof = Hello(PROTOCOL, own), ("decode", "prefill")
        if asks:
            await self.write(hello)
        other = await self._expect(Hello)
        if other.protocol != PROTOCOL:
            raise PeerRefused(f"protocol differs: {PROTOCOL} here, {other.protocol} there")
        nonces = (own, other.nonce) if asks else (other.nonce, own)
        us, them = proof if asks else proof[::-1]
        ours = Proof(prove(secret, us, nonces, facts), dict(facts), max_entry_bytes)
        if asks:
            await self.write(ours)
        else:
            await self.write(hello)
        theirs = await self._expect(Proof)
        if not is_proof(theirs.proof, secret, them, nonces, theirs.facts):
            raise PeerRefused("the secrets differ: both ends need the same --peer-secret-file")
        ends = (theirs.facts, facts) if asks else (facts, theirs.facts)
        if found := difference(*ends):
            raise PeerRefused(found)
        if not asks:
            await self.write(ours)
        self.max_entry_bytes = theirs.max_entry_bytes

    async def _expect(self, kind: type[Message]) -> Message:
        frame = await self.read(OPENINGS, MAX_HANDSHAKE_BYTES)
        if isinstance(frame, Refusal):
            raise PeerRefused(REFUSED_US + frame.reason)
        if not isinstance(frame, kind):
            raise PeerRefused(f"a {type(frame).__name__} in place of a {kind.__name__}")
        return frame


def reason_of(error: OSError) -> str:
    """What the system says, without what asyncio adds."""
    if error.errno is None or isinstance(error, socket.gaierror):  # a name has errors of its own
        return error.strerror or str(error)
    return os.strerror(error.errno)


def notice_lost_peer(connected: socket.socket) -> None:
    """A connection over which nothing is acknowledged for ten seconds is lost."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in PROBES.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


REFUSED_US = "refused by the other end: "
OPENINGS: msgspec.msgpack.Decoder[Opening] = msgspec.msgpack.Decoder(Opening)
