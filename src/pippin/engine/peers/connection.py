"""Frames and payloads on one connection between a prefill engine and a decode engine.

    decode engine    Hello ▶             Proof ▶                     Ask ▶  Cancel ▶
    prefill engine           ◀ Hello             ◀ Proof | Refusal          ◀ Entry ... ◀ End

    on one machine   ◀ Memory    Mapped ▶    ◀ Entry, its payload in that memory    Taken ▶

A frame is its length (4 bytes) and a message (msgpack); an `EntryFrame` is followed by its payload
unless that is in memory that both engines have mapped. Whatever the other end sends is bounded
before it is read: frames by a limit that the caller gives, payloads by the sizes that this end
expects, and every field.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import mmap
import os
import re
import secrets
import socket
import ssl
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from pippin.backends.base import Backend
from pippin.cache import entries
from pippin.cache.disk.fingerprint import model_fingerprint
from pippin.cache.entries import Bytes
from pippin.config import Config, PeersConfig
from pippin.errors import ConfigError, PippinError
from pippin.types import Component
from pippin.version import __version__

PROTOCOL = 1
LENGTH_BYTES = 4
NONCE_BYTES = 32
MAX_HANDSHAKE_BYTES = 8 << 10
MAX_ENTRY_FRAME_BYTES = 4 << 10  # and of an End
ASK_FRAME_BYTES = 64 << 10  # of an Ask, beside its tokens

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Text = Annotated[str, msgspec.Meta(max_length=500)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
Digest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
HashKey = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Hello(msgspec.Struct, tag="hello", frozen=True):
    protocol: Count
    nonce: HashKey


class Proof(msgspec.Struct, tag="proof", frozen=True):
    proof: HashKey
    facts: Annotated[dict[Name, Text], msgspec.Meta(max_length=16)]
    max_entry_bytes: Count  # that this end accepts


class Refusal(msgspec.Struct, tag="refusal", frozen=True):
    reason: Text


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """Compute this prompt, and send all of it but the KV of the first `held` tokens."""

    id: Name
    tokens: bytes  # int32, little-endian
    salt: Annotated[bytes, msgspec.Meta(max_length=64)]
    held: Count
    boundaries: Annotated[list[Count], msgspec.Meta(max_length=4096)]
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    id: Name


class Memory(msgspec.Struct, tag="memory", frozen=True):
    """Payloads can pass through it; see `OutgoingMemory`."""

    name: Name
    nbytes: Count
    token: HashKey


class Mapped(msgspec.Struct, tag="mapped", frozen=True):
    """The answer to a Memory."""

    is_mapped: bool


class Taken(msgspec.Struct, tag="taken", frozen=True):
    """All before this position in the memory."""

    end: Count


class EntryFrame(msgspec.Struct, tag="entry", frozen=True):
    """A payload of `nbytes` follows, or is in the memory."""

    id: Name
    component: Name
    start: Count
    end: Count
    chain: HashKey
    nbytes: Count
    digest: Digest
    at: Count | None = None  # position in the memory


class End(msgspec.Struct, tag="end", frozen=True):
    id: Name
    reason: Text


Opening = Hello | Proof | Refusal
ToPrefill = Ask | Cancel | Mapped | Taken
ToDecode = EntryFrame | End | Memory
Frame = Opening | ToPrefill | ToDecode
OPENINGS: msgspec.msgpack.Decoder[Opening] = msgspec.msgpack.Decoder(Opening)
TO_PREFILL: msgspec.msgpack.Decoder[ToPrefill] = msgspec.msgpack.Decoder(ToPrefill)
TO_DECODE: msgspec.msgpack.Decoder[ToDecode] = msgspec.msgpack.Decoder(ToDecode)


def limited(text: str) -> str:
    """A text as a frame may hold it."""
    return text[:500]


LEAST_SECRET_BYTES = 16


@dataclass(frozen=True)
class PeerKeys:
    """What both ends need to trust each other."""

    secret: bytes  # b"": none
    server: ssl.SSLContext | None  # None: there is no certificate
    client: ssl.SSLContext


def read_keys(config: PeersConfig) -> PeerKeys:
    """Raises ConfigError for files that cannot be used."""
    secret = b"" if config.peer_secret_file is None else _read_secret(config.peer_secret_file)
    server = None
    if config.peer_cert is not None:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            server.load_cert_chain(config.peer_cert, config.peer_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"peer_cert {config.peer_cert} cannot be used with peer_key {config.peer_key}: "
                f"{error}"
            ) from error
    try:
        client = ssl.create_default_context(cafile=config.peer_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"peer_ca {config.peer_ca} cannot be used: {error}") from error
    client.minimum_version = ssl.TLSVersion.TLSv1_3
    return PeerKeys(secret, server, client)


def _read_secret(name: str) -> bytes:
    try:
        secret = Path(name).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"peer_secret_file {name} cannot be read: {error}") from error
    if len(secret) < LEAST_SECRET_BYTES:
        raise ConfigError(
            f"the secret in peer_secret_file {name} has {len(secret)} bytes: use at least "
            f"{LEAST_SECRET_BYTES}, such as the output of `openssl rand -hex 32`"
        )
    return secret


RING_BYTES = 32 << 20
MAX_RING_BYTES = 1 << 30  # that is mapped, whatever the other end says
TOKEN_BYTES = 32
OLD_SECONDS = 120.0  # of a name: the answer takes far less
NAME = re.compile(r"pippin-[0-9a-f]{32}")
FOLDERS = ("/dev/shm", tempfile.gettempdir())  # the second one where the first is not there


class OutgoingMemory:
    """Made by the sender. The name of its file is gone as soon as the other end has answered, so
    nothing is left behind when both have ended. One that is killed before that leaves its file to
    the next one to remove.
    """

    def __init__(self, nbytes: int = RING_BYTES) -> None:
        """Raises OSError where there is no room for it: all of it is written to once."""
        self.name = f"pippin-{secrets.token_hex(16)}"
        self.nbytes = nbytes
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._path = _folder() / self.name
        _remove_old(self._path.parent)
        self._head = self._tail = 0
        try:
            with open(self._path, "xb+", opener=_open_private) as file:
                file.write(self.token.ljust(nbytes, b"\0"))
                file.flush()
                self._memory = _map(file.fileno(), nbytes)
        except OSError:
            self.remove_name()
            raise

    def remove_name(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def place(self, nbytes: int) -> int | None:
        """The position of a payload of 1 to all bytes; None until more was taken."""
        at = self._head
        if at % self.nbytes + nbytes > self.nbytes:
            at += self.nbytes - at % self.nbytes
        if self._tail == self._head:  # all was taken
            self._tail = at
        if at + nbytes - self._tail > self.nbytes:
            return None
        self._head = at + nbytes
        return at

    def write(self, at: int, payload: Sequence[Bytes]) -> None:
        at %= self.nbytes
        for view in entries.views(payload):
            self._memory[at : at + len(view)] = np.frombuffer(view, np.uint8)
            at += len(view)

    def free(self, end: int) -> bool:
        """What lies before this position was taken; False if it cannot have been."""
        is_valid = self._tail <= end <= self._head
        if is_valid:
            self._tail = end
        return is_valid


class IncomingMemory:
    """The same memory, as the receiver has mapped it."""

    def __init__(self, name: str, nbytes: int, token: bytes) -> None:
        """Raises OSError where it is not there, or is not what the sender made."""
        if not NAME.fullmatch(name) or not TOKEN_BYTES <= nbytes <= MAX_RING_BYTES:
            raise OSError(f"no memory of {nbytes:,} bytes is named {name}")
        descriptor = os.open(_folder() / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            is_private = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            if not is_private or found.st_size != nbytes:
                raise OSError(f"{name} is not a file of {nbytes:,} bytes of this user")
            self._memory = _map(descriptor, nbytes)
        finally:
            os.close(descriptor)
        if not hmac.compare_digest(self._memory[:TOKEN_BYTES].tobytes(), token):
            raise OSError(f"{name} is another memory of that name")
        self.nbytes = nbytes

    def read(self, at: int, arrays: Sequence[Bytes]) -> bool:
        """False: no payload of this size can lie there."""
        at %= self.nbytes
        views = entries.views(arrays)
        if at + sum(len(view) for view in views) > self.nbytes:
            return False
        for view in views:
            np.frombuffer(view, np.uint8)[:] = self._memory[at : at + len(view)]
            at += len(view)
        return True


def _folder() -> Path:
    return next(Path(folder) for folder in FOLDERS if os.access(folder, os.W_OK))


def _remove_old(folder: Path) -> None:
    for path in folder.glob("pippin-*"):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            is_old = time.time() - path.stat().st_mtime > OLD_SECONDS
            if is_old and NAME.fullmatch(path.name):
                path.unlink()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _map(descriptor: int, nbytes: int) -> Bytes:
    return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8)


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
