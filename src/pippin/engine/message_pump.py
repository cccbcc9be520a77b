"""Moves messages between a channel and the loop, and the feed along. Knows no processes."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from pippin.engine.events.event_sender import EventSender
from pippin.engine.events.recorder import Recorder
from pippin.engine.kv_events import Announcer
from pippin.messages import (
    Abort,
    Answer,
    Compiled,
    Finish,
    FlushCache,
    FromEngine,
    GetCounters,
    GetNode,
    GetStatus,
    Shutdown,
    Started,
    Submit,
    ToEngine,
    TokenBatch,
    Unwatch,
    Watch,
)
from pippin.scheduler.loop import Loop

IDLE_SECONDS = 0.5  # of a turn in which no message arrives


class Messages(Protocol):
    """Both directions, wherever the other end is."""

    def send(self, message: FromEngine) -> None: ...

    def receive(self, wait_seconds: float) -> list[ToEngine]:
        """Everything that has arrived; the first of it may take `wait_seconds`."""
        ...


class MessagePump:
    """Moves messages between channel and loop until a Shutdown arrives, or the loop fails."""

    def __init__(
        self,
        loop: Loop,
        channel: Messages,
        recorder: Recorder | None = None,
        announcer: Announcer | None = None,
    ) -> None:
        self._loop = loop
        self._channel = channel
        self._announcer = announcer
        self._events = EventSender(loop, recorder or Recorder(loop.scheduler), channel.send)
        loop.on_start = lambda ids: channel.send(Started(ids))
        loop.scheduler.compiling.on_compiled = lambda ids: channel.send(Compiled(ids))
        self.turn_began = time.monotonic()

    def run(self) -> None:
        while self._take_in(self._wait_seconds):
            self.turn_began = time.monotonic()
            self._events.flush()
            if self._loop.idle:
                if not self._loop.warm_up.done:
                    self._loop.warm_up.run_next()
            else:
                deltas = self._loop.step()
                if deltas:
                    self._channel.send(TokenBatch(deltas))
                if self._loop.failure is not None:
                    raise self._loop.failure
            if self._announcer is not None:
                self._announcer.collect()

    @property
    def _wait_seconds(self) -> float:
        """For a message, where nothing else is to be done."""
        if self._loop.idle and self._loop.warm_up.done:
            return min(IDLE_SECONDS, self._events.due_in)
        return 0.0

    def _take_in(self, wait_seconds: float) -> bool:
        """Handle what has arrived; False once a Shutdown is among it."""
        for message in self._channel.receive(wait_seconds):
            match message:
                case Submit():
                    self._loop.submit(message)
                case Abort(id):
                    self._loop.abort(id)
                case Finish(id):
                    self._loop.finish(id)
                case GetStatus(id):
                    self._answer(id, self._loop.status)
                case GetCounters(id):
                    self._answer(id, self._loop.counters)
                case FlushCache(id):
                    self._answer(id, functools.partial(self._loop.flush_cache, self._sender(id)))
                case GetNode(id, node):
                    self._answer(id, functools.partial(self._events.node, node))
                case Watch():
                    self._events.watch()
                case Unwatch():
                    self._events.unwatch()
                case Shutdown():
                    return False
        return True

    def _answer(self, id: str, find: Callable[[], dict[str, Any] | None]) -> None:
        """A question that cannot be answered fails alone: requests go on. `find` returns None where
        the answer is sent later."""
        try:
            found = find()
        except Exception as error:
            traceback.print_exc()
            error_text = f"the engine could not answer: {error!r}"
            self._channel.send(Answer(id, {}, error=error_text))
            return
        if found is not None:
            self._channel.send(Answer(id, found))

    def _sender(self, id: str) -> Callable[[dict[str, Any]], None]:
        return lambda found: self._channel.send(Answer(id, found))
