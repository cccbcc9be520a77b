"""Clients that watch the engine: one message for all of them. Knows no HTTP and no content.

    engine ── FeedMessage ──▶  Watchers  ──▶ a queue of a few messages each ──▶ its client

A client that falls behind loses what it has not read and gets another snapshot: no other waits for
it. The engine is sent a Watch when the first connects and an Unwatch when the last disconnects.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

import msgspec

from pippin.engine.events.schema import EngineLost
from pippin.errors import Overloaded, PippinError
from pippin.messages import FeedMessage, ToEngine, Unwatch, Watch

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
