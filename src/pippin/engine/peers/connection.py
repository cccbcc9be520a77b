"""Frames and payloads on one connection, and how it is opened.

Whatever the other end sends is bounded before it is read: frames by a limit that the caller gives,
payloads by the sizes that this end expects.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from pippin.backends.base import Backend
from pippin.cache import entries
from pippin.cache.disk.fingerprint import model_fingerprint
from pippin.cache.entries import Bytes
from pippin.config import Config
from pippin.engine.peers.shared_memory import IncomingMemory, OutgoingMemory
from pippin.engine.peers.wire_frames import (
    LENGTH_BYTES,
    MAX_HANDSHAKE_BYTES,
    NONCE_BYTES,
    OPENINGS,
    PROTOCOL,
    EntryFrame,
    Frame,
    Hello,
    Mapped,
    Memory,
    Proof,
    Refusal,
    Taken,
    limited,
)
from pippin.errors import PippinError
from pippin.types import Component
from pippin.version import __version__

Result = TypeVar("Result")
CLOSE_SECONDS = 2.0
CLOSE_TURNS = 10  # of the event loop, in which sockets that were closed are released


class WireThread:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """From any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Callable[[], object]) -> None:
        """From any thread: `work` runs here soon. Nothing happens after `close`."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(work)

    def close(self) -> None:
        """Cancels what runs."""
        if self.is_running:
            self.start(_cancel_others()).result(CLOSE_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for _ in range(CLOSE_TURNS):
        await asyncio.sleep(0)


Facts = Mapping[str, str]
HASHES, HASH_CHARS = ("weights", "layout"), 12
REMEDY = "start both with the same options"
REMEDIES = {
    "version": "install the same version of Pippin for both",
    "weights": "serve the same checkpoint with both",
    "dtype": "give both the same --dtype",
    "layout": "serve the same checkpoint with both, in the same --dtype",
    "deterministic": "give --deterministic to both on one kind of device, or to none",
}


def peer_facts(config: Config, backend: Backend) -> dict[str, str]:
    """In the order in which they are compared.

    Backends may differ: payloads have one layout on all of them. Where results have to be
    identical in every bit, they may not.
    """
    kept = [component for component in Component if component in backend.spec.components]
    arrays = [array for component in kept for array in backend.payload_arrays(component, 1)]
    is_fake = config.model.backend == "fake"
    facts = {
        "version": __version__,
        "weights": "none" if is_fake else model_fingerprint(Path(config.model.model), {}).hex(),
        "dtype": " ".join(sorted({array.dtype for array in arrays})),
        "layout": hashlib.blake2b(repr((kept, arrays)).encode(), digest_size=16).hexdigest(),
        "deterministic": "no",
    }
    if config.engine.deterministic:
        facts["deterministic"] = f"{backend.arithmetic} on {backend.device.kind}"
    return facts


def facts_fingerprint(facts: Facts) -> bytes:
    """By which both ends name entries."""
    return hashlib.blake2b(_encoded(facts), digest_size=32, person=b"pippin peers").digest()


def difference(prefill: Facts, decode: Facts) -> str | None:
    """The first fact that differs, in words that both ends may read; None if all agree."""
    for name in dict.fromkeys((*prefill, *decode)):
        sent, wanted = prefill.get(name, "unknown"), decode.get(name, "unknown")
        if sent != wanted:
            length = HASH_CHARS if name in HASHES else 80
            return (
                f"{name} differs: {sent[:length]} in the prefill engine, {wanted[:length]} in the "
                f"decode engine; {REMEDIES.get(name, REMEDY)}"
            )
    return None


def prove(secret: bytes, role: str, nonces: tuple[bytes, bytes], facts: Facts) -> bytes:
    """That the end in this role knows the secret. `nonces`: the decode engine's first."""
    text = b"\n".join((role.encode(), *nonces, _encoded(facts)))
    return hmac.new(secret, text, hashlib.sha256).digest()


def _encoded(facts: Facts) -> bytes:
    return repr(sorted(facts.items())).encode()


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
        for view in entries.views(arrays):
            at = 0
            while at < len(view):
                data = await self._read_some(len(view) - at)
                view[at : at + len(data)] = data
                at += len(data)

    async def skip_payload(self, nbytes: int) -> None:
        while nbytes:
            nbytes -= len(await self._read_some(nbytes))

    async def _read_some(self, most: int) -> bytes:
        data = await self._reader.read(min(READ_BYTES, most))
        if not data:
            raise asyncio.IncompleteReadError(b"", most)
        return data

    async def write(self, frame: Frame, payload: Sequence[Bytes] = ()) -> None:
        body = msgspec.msgpack.encode(frame)
        async with self._sending:
            self._writer.write(len(body).to_bytes(LENGTH_BYTES, "little") + body)
            for view in entries.views(payload):
                for at in range(0, len(view), WRITE_BYTES):
                    self._writer.write(view[at : at + WRITE_BYTES])
                    await self._writer.drain()
            await self._writer.drain()

    def post(self, frame: Frame) -> None:
        """Soon; it is lost where the other end has disconnected."""
        asyncio.ensure_future(self.write(frame)).add_done_callback(_note_failure)

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
        expected = prove(secret, them, nonces, theirs.facts)
        if not hmac.compare_digest(theirs.proof, expected):
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


def _note_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.info("a message to a peer was lost: %r", task.exception())


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
