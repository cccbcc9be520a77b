"""Requests on an engine, and on the next one if that is lost. Knows no text, no HTTP, no process.

    open requests   [ waiting: the engine has not started | started ]
    engine lost       submitted to the next engine        ended with an error

Nothing of a request that has not started was computed or sent, so it may be submitted to another
engine, unless it may be what this one died of (`clients/suspects.py`).
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

from pippin.engine.events.schema import EngineLost
from pippin.errors import (
    STATUSES,
    DeviceFailed,
    EngineDead,
    NotReady,
    Overloaded,
    PippinError,
    PoisonRequest,
    RequestError,
)
from pippin.messages import (
    Abort,
    Answer,
    Compiled,
    Delivered,
    FeedMessage,
    Finish,
    FlushCache,
    GetCounters,
    GetNode,
    GetStatus,
    Question,
    Started,
    Submit,
    ToEngine,
    TokenBatch,
    TokenDelta,
    Unwatch,
    Watch,
)


def check_replica(number: int, count: int) -> None:
    if not 0 <= number < count:
        numbers = "0" if count == 1 else f"0 to {count - 1}"
        raise RequestError(f"replica is {number}: use {numbers}", param="replica")


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
    submit: Submit
    deltas: DeltaQueue = field(default_factory=DeltaQueue)
    started: bool = False  # an engine reported it, or sent some of the reply
    compiled: bool = False  # likewise; a request without a grammar has nothing to compile
    num_engines: int = 0  # it was sent to
    sent: bool = False  # to the present engine, which ran then

    @property
    def waits_for_grammar(self) -> bool:
        return self.submit.params.grammar is not None and not (self.compiled or self.started)

    def returned(self) -> None:
        """No engine has it now."""
        self.sent = self.compiled = False


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


class Questions:
    def __init__(self, send: Callable[[Question], None]) -> None:
        self._send = send
        self._answers: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._ids = (f"call-{n}" for n in itertools.count())

    async def ask(self, question: Callable[[str], Question]) -> dict[str, Any]:
        """The answer to the question that `question` makes of an id."""
        id = next(self._ids)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[id] = future
        self._send(question(id))
        try:
            return await future
        finally:
            del self._answers[id]

    def answered(self, id: str, data: dict[str, Any], error: str | None) -> None:
        future = self._answers.get(id)
        if future is None or future.done():  # the client has disconnected
            return
        if error is None:
            future.set_result(data)
        else:
            future.set_exception(PippinError(error))

    def end(self, reason: str) -> None:
        """There will be no answers."""
        for future in self._answers.values():
            if not future.done():
                future.set_exception(EngineDead(reason))


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


class Engine(RequestEngine, Protocol):
    """What the API asks of an engine, wherever it runs."""

    @property
    def healthy(self) -> bool: ...

    @property
    def reason(self) -> str | None:
        """Why the engine is not healthy."""
        ...

    def check_ready(self) -> None:
        """Raise NotReady unless new requests are taken."""
        ...

    def abort(self, id: str) -> None:
        """The client disconnected. Unknown and finished ids are ignored."""
        ...

    async def status(self) -> dict[str, Any]: ...

    async def counters(self) -> dict[str, Any]:
        """The numbers of a status: cheap, however much is cached."""
        ...

    async def flush_cache(self) -> dict[str, Any]: ...

    def watch(self, replica: int = 0) -> AsyncGenerator[WatchEvent, None]:
        """What the engine does, from now on and over its restarts; Overloaded if too many watch."""
        ...

    async def node(self, node: int, replica: int = 0) -> dict[str, Any]:
        """The tokens of a node that watchers were sent; {} if there is none."""
        ...

    def restart(self) -> None:
        """Begin to replace replicas one after another; RequestError if there is only one."""
        ...


class Sender(Protocol):
    """The way to one engine."""

    @property
    def alive(self) -> bool:
        """Whether the engine runs: what is sent to one that does not is never read."""
        ...

    def send(self, message: ToEngine) -> None: ...


class EngineClient:
    """A supervisor calls it: an engine is ready, it is lost, a message of it arrived."""

    def __init__(self, suspects: Suspects | None = None) -> None:
        self._requests: dict[str, OpenRequest] = {}  # in order of arrival
        self._questions = Questions(self._send)
        self._sender: Sender | None = None
        self.reason: str | None = "the model is being loaded"
        self._watchers = Watchers(self._send)
        self._suspects = suspects or Suspects()
        self.draining = False
        self._none_open = asyncio.Event()
        self._none_open.set()

    # ---- what the API asks for -------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        return self.reason is None

    def check_ready(self) -> None:
        if self.draining:
            raise NotReady("the server is shutting down")
        if self.reason is not None:
            raise NotReady(self.reason)

    async def generate(self, submit: Submit) -> AsyncGenerator[TokenDelta, None]:
        self.check_ready()
        self._suspects.check(submit)
        request = OpenRequest(submit)
        self.open(request)
        try:
            while True:
                delta = await request.deltas.get()
                if delta.finish is not None:
                    self._forget(submit.id)
                if delta.finish in ("stop", "length"):
                    self._suspects.finished(submit)
                yield delta
                if delta.finish is not None:
                    return
        finally:
            self.abort(submit.id)

    def abort(self, id: str) -> None:
        if self._forget(id):
            self._send(Abort(id))

    def finish(self, id: str) -> None:
        if self._forget(id):
            self._send(Finish(id))

    async def status(self) -> dict[str, Any]:
        return await self._ask(GetStatus)

    async def counters(self) -> dict[str, Any]:
        return await self._ask(GetCounters)

    async def flush_cache(self) -> dict[str, Any]:
        return await self._ask(FlushCache)

    async def node(self, node: int, replica: int = 0) -> dict[str, Any]:
        check_replica(replica, 1)
        return await self._ask(lambda id: GetNode(id, node))

    def watch(self, replica: int = 0) -> AsyncGenerator[WatchEvent, None]:
        check_replica(replica, 1)
        return self._watchers.watch()

    def restart(self) -> None:
        raise RequestError(
            "there is one engine, and requests would be refused while it restarts: start the "
            "server with --replicas 2 or more"
        )

    # ---- engines that start and end --------------------------------------------------------

    def engine_ready(self, sender: Sender) -> None:
        """From now on requests are sent there, first of all those that wait."""
        self._sender = sender
        self.reason = None
        for request in self._requests.values():
            self._submit(request)
        self._watchers.engine_ready()

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
                self._questions.answered(id, data, error)
            case FeedMessage():
                self._watchers.deliver(message)

    def exited_as_asked(self) -> bool:
        """Whether the engine that was lost was asked to exit: then that is no failure."""
        return False

    def engine_lost(self, reason: str, *, knows_all: bool = False) -> None:
        """Requests that had started end with an error; the others wait for the next engine.

        `knows_all`: the engine stopped by itself, and everything that it sent was delivered.
        """
        self._sender = None
        self.reason = reason if self.draining else f"{reason}; another is being started"
        self._questions.end(reason)
        self._watchers.engine_lost(self.reason)
        requests = list(self._requests.values())
        kept = set(to_resubmit(requests, knows_all=knows_all))
        self._suspects.engine_lost(each.submit for each in requests if each not in kept)
        for request in requests:
            if request in kept and not self.draining:
                request.returned()
            else:
                self._end(request.submit.id, reason)

    # ---- the end ---------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return len(self._requests)

    def drain(self) -> None:
        """Refuse new requests. `drained` waits for the open ones to end."""
        self.draining = True

    async def drained(self) -> None:
        await self._none_open.wait()

    def close(self) -> None:
        """There will be no engine any more: everything ends."""
        reason = "the server is shutting down"
        self.draining = True
        self._sender = None
        self.reason = reason
        self._questions.end(reason)
        self._watchers.close()
        for id in list(self._requests):
            self._end(id, reason)

    # ----------------------------------------------------------------------------------------

    def open(self, request: OpenRequest) -> None:
        id = request.submit.id
        assert id not in self._requests, f"request id {id} is in use"
        self._requests[id] = request
        self._none_open.clear()
        self._submit(request)

    def _submit(self, request: OpenRequest) -> None:
        if self._sender is not None and self._sender.alive:
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

    def _end(self, id: str, reason: str) -> None:
        request = self._requests[id]
        self._forget(id)
        request.deltas.put(
            TokenDelta(
                id,
                finish="error",
                error=reason,
                error_code=EngineDead.code,
                error_status=STATUSES[EngineDead.code],
            )
        )

    def _forget(self, id: str) -> bool:
        """Whether the request was open."""
        was_open = self._requests.pop(id, None) is not None
        if not self._requests:
            self._none_open.set()
        return was_open

    async def _ask(self, question: Callable[[str], Question]) -> dict[str, Any]:
        if self.reason is not None:
            raise NotReady(self.reason)
        return await self._questions.ask(question)
