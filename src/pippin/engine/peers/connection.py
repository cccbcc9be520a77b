"""Frames and payloads on one connection, and how it is opened. Knows no requests and no entries.

Whatever the other end sends is bounded before it is read: frames by a limit that the caller gives,
payloads by the sizes that this end expects.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from pippin.cache.entries import blocks
from pippin.cache.entries.entry import Bytes
from pippin.engine.peers.agreement import Facts, difference, is_proof, prove
from pippin.engine.peers.wire_frames import (
    LENGTH_BYTES,
    MAX_HANDSHAKE_BYTES,
    NONCE_BYTES,
    PROTOCOL,
    Frame,
    Hello,
    Opening,
    Proof,
    Refusal,
    limited,
)
from pippin.errors import PippinError

READ_BYTES = 256 << 10  # of a payload at a time
WRITE_BYTES = 1 << 20
BUFFER_BYTES = 1 << 20
HANDSHAKE_SECONDS = 10.0

Message = TypeVar("Message")


class PeerRefused(PippinError):
    """The two ends do not fit together, or the other one does not keep to the protocol."""

    code = "peer_refused"


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._sending = asyncio.Lock()  # a frame and its payload lie together
        self.max_entry_bytes = 0  # that the other end accepts

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
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            self._writer.transport.abort()
        else:
            self._writer.close()

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
        if found := difference(facts, theirs.facts):
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


REFUSED_US = "refused by the other end: "
OPENINGS: msgspec.msgpack.Decoder[Opening] = msgspec.msgpack.Decoder(Opening)
