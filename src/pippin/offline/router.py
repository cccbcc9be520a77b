"""Steps a loop for several callers at once and returns to each of them its own deltas.

callers' submits  ──▶  backlog: what the loop's queue has no room for yet  ──▶  loop
callers' readers  ◀──  deltas, by request id                               ◀──

`LLM` steps it only while a caller waits for a delta, in that caller's thread; `AsyncLLM` does so in
a thread of its own, as long as there is something to do.
"""

from __future__ import annotations

import heapq
import itertools
import math
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pippin.errors import EngineDead
from pippin.messages import Submit, TokenDelta
from pippin.scheduler.loop import Loop

Reader = Callable[[TokenDelta], None]


class Router:
    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._backlog: list[tuple[int, int, Submit]] = []  # a heap: by priority, then arrival
        self._arrivals = itertools.count()
        self._readers: dict[str, Reader] = {}  # by request id, until its last delta was read
        self._leaving: list[tuple[Callable[[str], None], str]] = []  # before the next step
        # Still set after a step that raised: nothing is known of the state it left.
        self._in_step = False
        self._closed = False
        if loop.backend.warm_up_seconds == math.inf:  # no step is captured while requests run
            loop.warm_up.run_at_load(lambda _: None)

    @property
    def idle(self) -> bool:
        return self._loop.idle and not (self._backlog or self._leaving)

    def run(self, submits: Sequence[Submit]) -> Generator[TokenDelta, None, None]:
        """Deltas of these requests as they arrive. Closing it aborts those that still run."""
        inbox: deque[TokenDelta] = deque()
        try:
            for submit in submits:
                self.open(submit, inbox.append)
            num_open = len(submits)
            while num_open:
                while not inbox:
                    assert self._backlog or not self._loop.idle, "nothing will ever come"
                    self.step()
                delta = inbox.popleft()
                if delta.id in self._readers:  # else it was sent before the loop knew of `finish`
                    yield delta
                    if delta.finish is not None:
                        self.forget(delta.id)
                    num_open -= delta.id not in self._readers
        finally:
            for submit in submits:
                self.abort(submit.id)
            self._drain()

    def open(self, submit: Submit, reader: Reader) -> None:
        """`reader` is called with each delta until the request is forgotten, or left."""
        self._readers[submit.id] = reader
        heapq.heappush(self._backlog, (-submit.priority, next(self._arrivals), submit))

    def forget(self, request_id: str) -> None:
        """Its last delta was read."""
        self._readers.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        """Its caller has left. Ended requests are ignored."""
        self._leave(request_id, self._loop.abort)

    def finish(self, request_id: str) -> None:
        """The reply is complete (a stop string). Ended requests are ignored."""
        self._leave(request_id, self._loop.finish)

    def _drain(self) -> None:
        """If no request is open any more, step until the loop has released everything."""
        if self._readers or self._in_step or self._closed or self._loop.failure is not None:
            return
        while not self.idle:
            self.step()

    def close(self) -> None:
        """The loop is about to be closed: requests that are still open raise EngineDead."""
        self._closed = True

    def _leave(self, request_id: str, leave: Callable[[str], None]) -> None:
        # Called before the next step: an iterator may be closed by the garbage collector amid one.
        if self._readers.pop(request_id, None) is not None:
            self._leaving.append((leave, request_id))

    def step(self) -> None:
        if self._closed:
            raise EngineDead("the model has been closed")
        if self._in_step:
            raise EngineDead("the engine stopped in the middle of a step; load the model again")
        if self._loop.failure is not None:
            raise self._loop.failure
        with interrupts_held_back():
            self._in_step = True
            while self._leaving:
                leave, request_id = self._leaving.pop()
                leave(request_id)
            self._feed()
            for delta in self._loop.step():
                if (reader := self._readers.get(delta.id)) is not None:  # else its caller has left
                    reader(delta)
            self._in_step = False

    def _feed(self) -> None:
        while self._backlog:
            submit = self._backlog[0][-1]
            if submit.id in self._readers:  # else its caller has left
                if not self._loop.has_room(submit):
                    return
                self._loop.submit(submit)
            heapq.heappop(self._backlog)


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Ctrl-C takes effect at the end: half a step would leave an engine that cannot go on.

    The second one takes effect at once, for a step that never ends.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, Any]] = []

    def hold(number: int, frame: Any) -> None:
        held.append((number, frame))
        if len(held) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        handler(*held[0])
