"""One timer for all streams that have had nothing to send for a while. Knows no stream's bytes."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Protocol
from weakref import WeakKeyDictionary

HEARTBEAT_SECONDS = 10.0
TICKS = 10  # in this time


class QuietStream(Protocol):
    sent_at: float  # time.monotonic() of the last thing that was sent

    def beat(self) -> None: ...


class Heartbeats:
    """The streams of one event loop. Without streams there is no timer."""

    def __init__(self) -> None:
        self._streams: set[QuietStream] = set()
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of_this_loop(cls) -> Heartbeats:
        return _OF_LOOPS.setdefault(asyncio.get_running_loop(), cls())

    def add(self, stream: QuietStream) -> None:
        self._streams.add(stream)
        if self._timer is None:
            self._start()

    def remove(self, stream: QuietStream) -> None:
        self._streams.discard(stream)
        if not self._streams and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HEARTBEAT_SECONDS / TICKS, self._tick)

    def _tick(self) -> None:
        due = monotonic() - HEARTBEAT_SECONDS
        for stream in [each for each in self._streams if each.sent_at <= due]:
            stream.beat()
        self._start()


_OF_LOOPS: WeakKeyDictionary[asyncio.AbstractEventLoop, Heartbeats] = WeakKeyDictionary()
