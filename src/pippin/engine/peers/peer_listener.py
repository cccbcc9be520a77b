"""The prefill engine's end: decode engines connect, ask for prompts, and are sent them. A prompt is
submitted to the engine like any request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from pippin.cache.entries import Bytes, Entry
from pippin.cache.peer_store import Wanted
from pippin.config import PeerAddress
from pippin.engine.peers.connection import (
    ASK_FRAME_BYTES,
    BUFFER_BYTES,
    CLOSE_SECONDS,
    HANDSHAKE_SECONDS,
    TO_PREFILL,
    Ask,
    Cancel,
    Connection,
    End,
    EntryFrame,
    Facts,
    PeerKeys,
    PeerRefused,
    Taken,
    WireThread,
    limited,
    reason_of,
)
from pippin.errors import LoadError
from pippin.messages import Abort, Submit
from pippin.scheduler.spills import Pushes, PushTarget
from pippin.types import ModelSpec, SamplingParams

MAX_CONNECTIONS = 32
MAX_OPENING = 32  # connections that may be those of strangers
MAX_REFUSALS = 100  # that are remembered
MAX_ASKS = 64  # of one connection, at a time
SEND_SECONDS = 60.0  # of one entry: a decode engine that reads nothing for so long is disconnected
START_SECONDS = 10.0

Deliver = Callable[[Submit | Abort], None]  # to the engine; from any thread
logger = logging.getLogger(__name__)


class PeerListener:
    def __init__(
        self,
        address: PeerAddress,
        keys: PeerKeys,
        facts: Facts,
        spec: ModelSpec,
        pushes: Pushes,
        deliver: Deliver,
    ) -> None:
        """Listens when this returns. Raises LoadError where that is impossible."""
        tls = keys.server if address.is_tls else None
        self._secret = keys.secret
        self._facts = facts
        self.shares_memory = tls is None  # then all decode engines are on this machine
        self.spec = spec
        self.pushes = pushes
        self.deliver = deliver
        self.thread = WireThread("pippin-peers")
        self._numbers = itertools.count()
        self._clients: set[AskingPeer] = set()
        self._refusals: set[tuple[str, str]] = set()  # that were logged
        self._connections: dict[asyncio.Task[None], Connection] = {}
        self._opening: dict[asyncio.Task[None], str] = {}  # their hosts: no secret was proven yet
        try:
            listening = asyncio.start_server(
                self._serve,
                address.host,
                address.port,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else HANDSHAKE_SECONDS,
                limit=BUFFER_BYTES,
                reuse_address=True,
            )
            self._server = self.thread.start(listening).result(START_SECONDS)
        except OSError as error:
            self.thread.close()
            raise LoadError(
                f"peer_listen is {address}, which cannot be used ({reason_of(error)}): use an "
                "address of this machine and a free port"
            ) from error

    @property
    def port(self) -> int:
        return int(self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = str(writer.get_extra_info("peername"))
        connection = Connection(reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = connection
        try:
            self._opening[task] = _host_of(writer)
            if len(self._opening) > MAX_OPENING:
                self._abort_an_opening()
            if len(self._clients) >= MAX_CONNECTIONS:
                raise PeerRefused(f"{MAX_CONNECTIONS} decode engines are connected already")
            await connection.agree(self._facts, self._secret, 0, asks=False)
            self._opening.pop(task, None)
            logger.info("a decode engine connected from %s", name)
            peer = AskingPeer(self, connection, next(self._numbers))
            self._clients.add(peer)
            try:
                await peer.serve()
            finally:
                self._clients.discard(peer)
                peer.leave()
        except PeerRefused as error:
            self._note_refusal(writer, str(error))
        except (OSError, asyncio.IncompleteReadError) as error:
            logger.info("a decode engine at %s disconnected: %s", name, error)
        finally:
            self._opening.pop(task, None)
            del self._connections[task]
            connection.close()

    def _abort_an_opening(self) -> None:
        """The oldest of the host that has most: silent strangers keep no engine away."""
        most, _ = Counter(self._opening.values()).most_common(1)[0]
        task = next(task for task, host in self._opening.items() if host == most)
        del self._opening[task]
        self._connections[task].abort()

    def _note_refusal(self, writer: asyncio.StreamWriter, reason: str) -> None:
        """Once for each host and reason: a decode engine tries again for ever."""
        host, port = _host_of(writer), writer.get_extra_info("peername")[1]
        if (host, reason) in self._refusals:
            return
        if len(self._refusals) >= MAX_REFUSALS:
            self._refusals.clear()
        self._refusals.add((host, reason))
        logger.warning("a decode engine at %s, port %s, was refused: %s", host, port, reason)

    def close(self) -> None:
        """Decode engines are disconnected."""
        if self.thread.is_running:
            self.thread.start(self._close()).result(CLOSE_SECONDS)
            self.thread.close()

    async def _close(self) -> None:
        self._server.close()
        for connection in self._connections.values():
            connection.close()
        if self._connections:
            await asyncio.wait(list(self._connections), timeout=CLOSE_SECONDS / 2)


def _host_of(writer: asyncio.StreamWriter) -> str:
    return str(writer.get_extra_info("peername")[0])


class AskingPeer:
    """One decode engine. Its `send` and `end` are called by other threads."""

    def __init__(self, listener: PeerListener, connection: Connection, number: int) -> None:
        self._listener = listener
        self._connection = connection
        self._number = number
        self._open: dict[str, str] = {}  # hand-overs: the name of each one's request
        self._requests = itertools.count()
        # Its thread ends with the last push that writes there: steps in flight may yet bring more.
        self._writer = ThreadPoolExecutor(1, f"pippin-push-{number}")
        self._left = False
        self._offered = False  # memory, which takes some: not before it is needed

    async def serve(self) -> None:
        """Until it disconnects."""
        most = ASK_FRAME_BYTES + 4 * self._listener.spec.max_len
        while True:
            frame = await self._connection.read(TO_PREFILL, most)
            if isinstance(frame, Ask):
                self._take(frame)
                if self._listener.shares_memory and not self._offered:
                    self._offered = True
                    await self._connection.offer_memory()
            elif isinstance(frame, Cancel):
                self._cancel(frame.id)
            elif isinstance(frame, Taken):
                self._connection.free(frame)
            else:
                self._connection.take_answer(frame)

    def _take(self, ask: Ask) -> None:
        listener, spec = self._listener, self._listener.spec
        if ask.id in self._open:
            raise PeerRefused(f"hand-over {ask.id} was asked for twice")
        if len(self._open) >= MAX_ASKS:
            raise PeerRefused(f"more than {MAX_ASKS} prompts at a time")
        if len(ask.tokens) % 4 or not 4 <= len(ask.tokens) < 4 * spec.max_len:
            raise PeerRefused(
                f"a prompt of {len(ask.tokens):,} bytes, the model holds {spec.max_len:,} tokens"
            )
        tokens = np.frombuffer(ask.tokens, dtype="<i4").astype(np.int32)
        if tokens.min() < 0 or tokens.max() >= spec.vocab_size or ask.held > len(tokens):
            raise PeerRefused("a prompt has tokens that the model does not have")
        wanted = Wanted(
            ask.id, tokens, ask.salt, ask.held, tuple(ask.boundaries), priority=ask.priority
        )
        # Not of the id: one that was cancelled may be asked for again while it still runs.
        name = self._open[ask.id] = f"peer-{self._number}-{next(self._requests)}"
        most = self._connection.max_entry_bytes
        listener.pushes.targets[name] = PushTarget(wanted, self, self._writer, most)
        listener.deliver(
            Submit(
                name,
                ask.tokens,
                SamplingParams(max_tokens=1, temperature=0.0, speculate=False),
                boundaries=[at for at in ask.boundaries if at <= len(tokens)],
                priority=ask.priority,
                salt=ask.salt,
                handover=name,
            )
        )

    def _cancel(self, id: str) -> None:
        if (name := self._open.pop(id, None)) is not None:
            self._listener.deliver(Abort(name))

    def leave(self) -> None:
        """It has disconnected: what it asked for is not computed any further."""
        self._left = True
        for id in list(self._open):
            self._cancel(id)

    # ---- other threads ---------------------------------------------------------------------

    def send(self, id: str, entry: Entry, data: Sequence[Bytes], digest: bytes) -> bool:
        if self._left or id not in self._open:
            return False
        key = entry.key
        frame = EntryFrame(
            id, key.component.value, entry.start, entry.end, key.chain, entry.nbytes, digest
        )
        sending: Future[None] = self._listener.thread.start(
            self._connection.write_entry(frame, data)
        )
        try:
            sending.result(SEND_SECONDS)
        except (OSError, TimeoutError) as error:
            logger.warning("an entry could not be sent to a decode engine: %r", error)
            self._listener.thread.call(self._connection.close)
            return False
        return True

    def end(self, id: str, reason: str) -> None:
        self._listener.thread.call(lambda: self._end(id, reason))

    def _end(self, id: str, reason: str) -> None:
        if self._open.pop(id, None) is not None and not self._left:
            self._connection.post(End(id, limited(reason)))
