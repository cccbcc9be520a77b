"""Requests on one engine, and on the next one if that is lost.

    open requests   [ waiting: the engine has not started | started ]
    engine lost       submitted to the next engine        ended with an error

Nothing of a request that has not started was computed or sent, so it may be submitted to another
engine, unless it may be what this one died of (`Suspects`).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Protocol

import msgspec
import zmq
import zmq.asyncio

from pippin.engine.events.schema import EngineLost
from pippin.engine.kv_events import BLOCK_TOKENS
from pippin.errors import (
    STATUSES,
    DeviceFailed,
    EngineDead,
    NotReady,
    Overloaded,
    PippinError,
    PoisonRequest,
)
from pippin.messages import (
    Abort,
    Answer,
    Compiled,
    Delivered,
    FeedMessage,
    Finish,
    FromEngine,
    Question,
    RestorablePrefixes,
    Shutdown,
    Started,
    Submit,
    ToEngine,
    TokenBatch,
    TokenDelta,
    Unwatch,
    Watch,
)

FAILED = ("error", "abort")


class DeltaQueue:
    """Written by the event loop's own calls, read by one task."""

    def __init__(self) -> None:
        self._waiting: list[TokenDelta] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, delta: TokenDelta) -> None:
        self._waiting.append(delta)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> TokenDelta:
        """All that has arrived. What failed is a delta by itself: tokens before it are shown."""
        if not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        waiting = self._waiting
        if len(waiting) == 1:
            self._waiting = []
            return waiting[0]
        num_joined = len(waiting) - (waiting[-1].finish in FAILED)
        self._waiting = waiting[num_joined:]
        return joined_deltas(waiting[:num_joined])


def joined_deltas(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """One delta of the same tokens. The first says what the cache saved, the last how it ended."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return msgspec.structs.replace(
        last,
        tokens=list(chain.from_iterable(delta.tokens for delta in deltas)),
        logprobs=list(chain.from_iterable(logprobs)) if logprobs else None,
        prompt_logprobs=first.prompt_logprobs,
        cached_tokens=first.cached_tokens,
        host_tokens=first.host_tokens,
        disk_tokens=first.disk_tokens,
        peer_tokens=first.peer_tokens,
        queued_s=first.queued_s,
    )


MAX_ENGINES = 2  # that one request is submitted to
MAX_DEATHS = 2  # at which one request was in flight; then it is refused
REMEMBERED_SUSPECTS = 4096


@dataclass(eq=False)
class OpenRequest:
    """A request, and how far it is on the engine that it was sent to."""

    submit: Submit
    hashes: list[int] = field(default_factory=list)  # of the whole blocks of its prompt
    deltas: DeltaQueue = field(default_factory=DeltaQueue)
    started: bool = False  # an engine reported it, or sent some of the reply
    compiled: bool = False  # likewise; a request without a grammar has nothing to compile
    num_engines: int = 0  # it was sent to
    sent: bool = False  # to the present engine, which ran then
    num_to_compute: int = 0  # tokens of its prompt; 0 once its reply has begun

    @property
    def waits_for_grammar(self) -> bool:
        return self.submit.params.grammar is not None and not (self.compiled or self.started)


def to_resubmit(requests: Iterable[OpenRequest], *, knows_all: bool) -> list[OpenRequest]:
    """Those that cannot be what a lost engine died of, in their order.

    `knows_all`: the engine stopped by itself, and everything that it sent has arrived.
    """
    requests = list(requests)
    # Beside a request that was running, another one was not alone in its step.
    others_ran = any(request.started for request in requests)
    return [
        request
        for request in requests
        if not request.sent
        or (
            not request.started
            and request.num_engines < MAX_ENGINES
            and (knows_all or (others_ran and not request.waits_for_grammar))
        )
    ]


class Suspects:
    """Requests that were in flight when an engine was lost, by a digest of what they ask for."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, int] = OrderedDict()

    def check(self, submit: Submit) -> None:
        """Raises if it is not to be served."""
        if self._deaths and self._deaths.get(_digest(submit), 0) >= MAX_DEATHS:
            raise PoisonRequest(
                f"the engine was lost {MAX_DEATHS} times while this same request was in flight; it "
                "is refused until the server is restarted"
            )

    def engine_lost(self, in_flight: Iterable[Submit]) -> None:
        for digest in {_digest(submit) for submit in in_flight}:
            self._deaths[digest] = self._deaths.get(digest, 0) + 1
            self._deaths.move_to_end(digest)
            if len(self._deaths) > REMEMBERED_SUSPECTS:
                self._deaths.popitem(last=False)

    def finished(self, submit: Submit) -> None:
        """It was served in between: then it is not what the engine dies of."""
        if self._deaths:
            self._deaths.pop(_digest(submit), None)


def _digest(submit: Submit) -> bytes:
    """Of all but the id and the salt, which change nothing that an engine computes."""
    body = msgspec.structs.replace(submit, id="", salt=b"")
    return hashlib.blake2b(msgspec.msgpack.encode(body), digest_size=16).digest()


MAX_WATCHERS = 32
MAX_UNREAD = 20  # messages: two seconds


class WatchEvent(NamedTuple):
    name: str  # "snapshot", "frame" or "engine"
    json: bytes


class _Watcher:
    def __init__(self) -> None:
        self.unread: deque[WatchEvent] = deque()
        self.in_step = False  # it has a snapshot, and every frame since
        self.waits = False  # for a snapshot that was asked for
        self.is_lost = False  # the engine's event sender has failed
        self.wakes = asyncio.Event()

    def put(self, event: WatchEvent) -> None:
        self.unread.append(event)
        self.wakes.set()


class Watchers:
    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._watchers: set[_Watcher] = set()
        self._closed = False

    async def watch(self) -> AsyncGenerator[WatchEvent, None]:
        """Overloaded if there are too many clients, PippinError if the event sender failed."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} clients watch already, which is the limit")
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            while not self._closed:
                while watcher.unread:
                    yield watcher.unread.popleft()
                if watcher.is_lost:
                    raise PippinError(
                        "the event sender of the engine failed; requests are served as before"
                    )
                if not (watcher.in_step or watcher.waits):  # it is new, or fell behind
                    watcher.waits = True
                    self._send(Watch())
                await watcher.wakes.wait()
                watcher.wakes.clear()
        finally:
            self._watchers.remove(watcher)
            if not self._watchers:
                self._send(Unwatch())

    def deliver(self, message: FeedMessage) -> None:
        """To all, without waiting for any."""
        if message.kind == "lost":
            for watcher in self._watchers:
                watcher.is_lost = True
                watcher.wakes.set()
            return
        event = WatchEvent(message.kind, message.json)
        for watcher in self._watchers:
            if message.kind == "snapshot":
                if not watcher.in_step:
                    watcher.in_step, watcher.waits = True, False
                    watcher.put(event)
            elif watcher.in_step and len(watcher.unread) < MAX_UNREAD:
                watcher.put(event)
            else:
                watcher.in_step = False

    def engine_ready(self) -> None:
        if self._watchers:
            self._send(Watch())

    def engine_lost(self, reason: str) -> None:
        event = WatchEvent("engine", msgspec.json.encode(EngineLost(reason)))
        for watcher in self._watchers:
            watcher.in_step = watcher.waits = False
            watcher.put(event)

    def close(self) -> None:
        """There will be no engine any more: streams end once they have been read."""
        self._closed = True
        for watcher in self._watchers:
            watcher.wakes.set()


class RequestEngine(Protocol):
    """What a request uses of an engine."""

    def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        """The request's deltas up to its terminal one; NotReady if it is not taken.

        What has arrived since the last one was read is one delta.
        A generator closed or cancelled before that aborts the request.
        """
        ...

    def finish(self, id: str) -> None:
        """The reply is complete (a stop string): no more deltas of it are wanted."""
        ...


MAX_PREFIXES = 1 << 18  # of 64 tokens each: 16 million tokens, in some 30 MB


class PrefixIndex:
    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        """Of more prefixes, those that are reported later are not known."""
        self._max_prefixes = max_prefixes
        self._reported: dict[int, int] = {}  # hash: in how many tiers
        self._expected: dict[int, int] = {}  # hash: by how many prompts
        self._sent: OrderedDict[int, None] = OrderedDict()  # hashes, the latest last

    def __len__(self) -> int:
        return len(self._reported)

    def change(self, message: RestorablePrefixes) -> None:
        if message.cleared:
            self._reported.clear()
        room = self._max_prefixes
        for hash in message.stored:
            if hash in self._reported or len(self._reported) < room:
                _count(self._reported, hash, 1)
        for hash in message.removed:
            _count(self._reported, hash, -1)

    def clear(self) -> None:
        """The engine is lost; prompts that it computes are dropped one by one."""
        self._reported.clear()
        self._sent.clear()

    def expect(self, hashes: Iterable[int]) -> None:
        for hash in hashes:
            _count(self._expected, hash, 1)
            self._sent[hash] = None
            self._sent.move_to_end(hash)
        while len(self._sent) > self._max_prefixes:
            self._sent.popitem(last=False)

    def drop(self, hashes: Iterable[int]) -> None:
        for hash in hashes:
            _count(self._expected, hash, -1)

    def restorable_tokens(self, hashes: Sequence[int]) -> int:
        """Of a prompt whose blocks have these hashes."""
        for index in range(len(hashes) - 1, -1, -1):
            if hashes[index] in self._reported or hashes[index] in self._expected:
                return (index + 1) * BLOCK_TOKENS
        return 0

    def home_tokens(self, hashes: Sequence[int]) -> float:
        """The memory that another replica would spend on a copy of what was sent here before.

        Also of what was evicted since: prompts that come back to one replica leave the memory of
        the others to other prompts. All prompts that share a block need one copy of it, so it is
        divided among this one and those that are open here.
        """
        for index in range(len(hashes) - 1, -1, -1):
            if hashes[index] in self._sent:
                known = hashes[: index + 1]
                return sum(BLOCK_TOKENS / (1 + self._expected.get(hash, 0)) for hash in known)
        return 0.0


def _count(counts: dict[int, int], hash: int, change: int) -> None:
    """A hash that is not known cannot become less."""
    count = counts.get(hash, 0) + change
    if count > 0:
        counts[hash] = count
    else:
        counts.pop(hash, None)


LINGER_MS = 200


class Connection:
    """The way to one engine."""

    def __init__(
        self, inbox: str, outbox: str, is_running: Callable[[], bool] = lambda: True
    ) -> None:
        """`is_running`: whether there is a process that reads the inbox."""
        self._is_running = is_running
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._push: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._pull = zmq.asyncio.Context.instance().socket(zmq.PULL)
        for socket in (self._push, self._pull):
            socket.set_hwm(0)  # sending never blocks, so it can be a plain call
            socket.linger = LINGER_MS
        self._push.connect(inbox)
        self._pull.connect(outbox)

    @property
    def alive(self) -> bool:
        """Whether the engine runs: what is sent to one that does not is never read."""
        return self._is_running()

    def send(self, message: ToEngine) -> None:
        self._push.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def receive(self) -> FromEngine:
        frame = await self._pull.recv()
        try:
            return self._decoder.decode(frame)
        except msgspec.DecodeError as error:
            raise EngineDead(
                f"the engine sent a message that cannot be decoded: {error}"
            ) from error

    def close(self) -> None:
        self._push.close()
        self._pull.close()


# What an open request weighs, in tokens of a prompt: it delays the steps of others, and its row
# takes memory from the cache. With less, one replica attracts most conversations, and evicts some.
ROW_TOKENS = 128


class EngineClient:
    """One replica. A supervisor reports that an engine is ready or lost, and its messages."""

    def __init__(self, suspects: Suspects, on_change: Callable[[], None]) -> None:
        """`on_change`: its engine is ready, or lost."""
        self.reason: str | None = "the model is being loaded"  # why it is not healthy
        self.prefixes = PrefixIndex()
        self.draining = False
        self.num_to_compute = 0  # tokens of prompts that have no reply yet
        self.is_resting = False  # requests are routed elsewhere, if there is another
        self.is_restarting = False  # requests wait for the next engine
        self.is_wanted = asyncio.Event()  # not set: its engine failed too often, and stays down
        self.is_wanted.set()
        self.watchers = Watchers(self._send)
        self._requests: dict[str, OpenRequest] = {}  # in order of arrival
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}  # by the question's id
        self._question_ids = (f"call-{n}" for n in itertools.count())
        self._sender: Connection | None = None
        self._suspects = suspects
        self._on_change = on_change
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._was_asked_to_exit = False
        self._replaced = asyncio.Event()  # an engine is ready, or there will be none

    @property
    def healthy(self) -> bool:
        return self.reason is None

    @property
    def serves(self) -> bool:
        sender = self._sender
        return self.healthy and not self.is_restarting and sender is not None and sender.alive

    @property
    def num_open(self) -> int:
        return len(self._requests)

    @property
    def load(self) -> int:
        """In tokens that prefill would compute in that time."""
        return self.num_to_compute + ROW_TOKENS * self.num_open

    @property
    def state(self) -> str:
        if self.is_restarting:
            return "restarting"
        if not self.healthy:
            return self.reason or "lost"
        return "draining" if self.is_resting else "serving"

    # ---- requests --------------------------------------------------------------------------

    def open(self, request: OpenRequest) -> None:
        request.num_to_compute = request.submit.prompt_len
        if request.hashes:
            restorable = self.prefixes.restorable_tokens(request.hashes)
            request.num_to_compute = max(request.num_to_compute - restorable, 0)
            self.prefixes.expect(request.hashes)
        self.num_to_compute += request.num_to_compute
        self._requests[request.submit.id] = request
        self._none_open.clear()
        self._submit(request)

    def computed(self, request: OpenRequest) -> None:
        """Its prompt."""
        self.num_to_compute -= request.num_to_compute
        request.num_to_compute = 0

    def forget(self, id: str) -> bool:
        """Its reply has ended. Whether it was open."""
        request = self._requests.pop(id, None)
        if request is not None:
            self.num_to_compute -= request.num_to_compute
            request.num_to_compute = 0
            if request.hashes:
                self.prefixes.drop(request.hashes)
        if not self._requests:
            self._none_open.set()
        return request is not None

    def leave(self, message: Abort | Finish) -> None:
        """Before its reply has ended. Unknown and finished ids are ignored."""
        if self.forget(message.id):
            self._send(message)

    def release_unsent(self) -> list[OpenRequest]:
        """Requests that no engine has, in order of arrival: they are another replica's now."""
        unsent = [request for request in self._requests.values() if not request.sent]
        for request in unsent:
            self.forget(request.submit.id)
        return unsent

    async def ask(self, question: Callable[[str], Question]) -> dict[str, Any]:
        """The answer to the question that `question` makes of an id."""
        if self.reason is not None:
            raise NotReady(self.reason)
        id = next(self._question_ids)
        self._answers[id] = asyncio.get_running_loop().create_future()
        self._send(question(id))
        try:
            return await self._answers[id]
        finally:
            del self._answers[id]

    # ---- the end ---------------------------------------------------------------------------

    async def drained(self) -> None:
        await self._none_open.wait()

    def close(self) -> None:
        """There will be no engine any more: everything ends."""
        self.draining = True
        self._sender = None
        self.reason = "the server is shutting down"
        self.watchers.close()
        self._end(self._requests.values(), self.reason)

    async def replace_engine(self) -> None:
        """Its requests end, then its engine exits and another is loaded.

        Raises EngineDead if engines failed to load until the supervisor gave up.
        """
        self.is_resting = True
        self.is_wanted.set()
        try:
            while self.num_open:
                await self.drained()
            self._replaced.clear()
            if self.healthy:
                self.is_restarting = self._was_asked_to_exit = True
                self._send(Shutdown())
            await self._replaced.wait()
        finally:
            self.is_resting = False
        if not self.is_wanted.is_set():
            raise EngineDead(self.reason or "")

    # ---- what a supervisor calls -----------------------------------------------------------

    def engine_ready(self, sender: Connection) -> None:
        """From now on requests are sent there, first of all those that wait."""
        self.is_restarting = self._was_asked_to_exit = False
        self._sender = sender
        self.reason = None
        for request in self._requests.values():
            self._submit(request)
        self.watchers.engine_ready()
        self._replaced.set()
        self._on_change()

    def deliver(self, message: Delivered) -> None:
        match message:
            case TokenBatch(deltas=deltas):
                for delta in deltas:
                    self._take(delta)
            case Started(ids=ids) | Compiled(ids=ids):
                for request in (self._requests[id] for id in ids if id in self._requests):
                    request.compiled = True
                    request.started |= isinstance(message, Started)
            case Answer(id=id, data=data, error=error):
                answer = self._answers.get(id)
                if answer is None or answer.done():  # the client has disconnected
                    return
                if error is None:
                    answer.set_result(data)
                else:
                    answer.set_exception(PippinError(error))
            case FeedMessage():
                self.watchers.deliver(message)
            case RestorablePrefixes():
                self.prefixes.change(message)

    def exited_as_asked(self) -> bool:
        """Whether the engine that was lost was asked to exit: then that is no failure. Once: the
        engines that follow are to serve."""
        asked, self._was_asked_to_exit = self._was_asked_to_exit, False
        return asked

    def engine_lost(self, reason: str, *, knows_all: bool = False) -> None:
        """Requests that had started end with an error; the others wait for the next engine.

        `knows_all`: the engine stopped by itself, and everything that it sent was delivered.
        """
        self._replaced.clear()
        self.prefixes.clear()
        self._sender = None
        self.reason = reason if self.draining else f"{reason}; another is being started"
        self.watchers.engine_lost(self.reason)
        requests = list(self._requests.values())
        kept = set(to_resubmit(requests, knows_all=knows_all))
        self._suspects.engine_lost(each.submit for each in requests if each not in kept)
        for request in kept:
            request.sent = request.compiled = False
        self._end([each for each in requests if self.draining or each not in kept], reason)
        self._on_change()

    def give_up(self, reason: str) -> None:
        """Its engine is not restarted until it is wanted."""
        self.is_wanted.clear()
        self.is_restarting = False
        self.reason = reason
        self._replaced.set()
        self._on_change()

    # ----------------------------------------------------------------------------------------

    def _submit(self, request: OpenRequest) -> None:
        if self._sender is not None and self._sender.alive and not self.is_restarting:
            request.sent = True
            request.num_engines += 1
            self._sender.send(request.submit)

    def _send(self, message: ToEngine) -> None:
        if self._sender is not None:  # else no engine has to know
            self._sender.send(message)

    def _take(self, delta: TokenDelta) -> None:
        request = self._requests.get(delta.id)
        if request is None:  # it has ended
            return
        if not request.started and delta.error_code == DeviceFailed.code:
            return  # it failed with all others; the next engine serves it
        request.started = True
        request.deltas.put(delta)

    def _end(self, requests: Iterable[OpenRequest], reason: str) -> None:
        """With an error, as all questions do."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDead(reason))
        for id, deltas in [(each.submit.id, each.deltas) for each in requests]:
            self.forget(id)
            deltas.put(
                TokenDelta(
                    id,
                    finish="error",
                    error=reason,
                    error_code=EngineDead.code,
                    error_status=STATUSES[EngineDead.code],
                )
            )
