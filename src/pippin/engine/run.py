"""The engine process: loads a backend, and moves messages between its loop and the server.

    python -m pippin.engine.run      reads an `EngineSpec` from the first line of stdin

The rest of stdin says nothing until it ends: the server holds the other end, so end of file means
that the server stopped, however it died. Then the engine leaves too.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pippin.config import ServerConfig
from pippin.engine.build_loop import build_loop, listen
from pippin.engine.engine_spec import EXIT_GRACE_SECONDS, EngineSpec
from pippin.engine.events.event_sender import EventSender
from pippin.engine.kv_events import (
    Announcer,
    EventForm,
    EventPublisher,
    Listener,
    PublishingThread,
    prefix_reports,
)
from pippin.errors import ConfigError, PippinError
from pippin.logs import configure_logging
from pippin.messages import (
    Abort,
    Alive,
    Answer,
    Compiled,
    Failed,
    Finish,
    FlushCache,
    FromEngine,
    GetCounters,
    GetNode,
    GetStatus,
    Loading,
    Ready,
    Shutdown,
    Started,
    Submit,
    ToEngine,
    TokenBatch,
    Unwatch,
    Watch,
)
from pippin.metrics import StepLog
from pippin.scheduler.loop import Loop
from pippin.scheduler.scheduler import Scheduler


def publish_events(
    config: ServerConfig, scheduler: Scheduler, replica: int = 0
) -> PublishingThread | None:
    """For subscribers; None where it is off. Raises ConfigError."""
    if config.kv_events is None:
        return None
    if scheduler.cache is None:
        raise ConfigError(
            "kv_events requires the prefix cache, which is off: remove --kv-events or "
            "--no-prefix-cache"
        )
    publisher = EventPublisher(config.kv_events, config.kv_events_replay)
    form = EventForm(config.kv_events_form, scheduler.cache.rules, replica)
    return PublishingThread(form, publisher)


def announce(scheduler: Scheduler, listeners: Sequence[Listener]) -> Announcer | None:
    """What is cached, from now on; None where no one listens."""
    if scheduler.cache is None or not listeners:
        return None
    announcer = Announcer()
    for listener in listeners:
        announcer.add(listener)
    announcer.observe("memory", scheduler.cache)
    for tier, _ in scheduler.tiers:
        if tier.kind.name != "peer":  # what prefill engines sent is on its way into memory
            announcer.observe(tier.kind.name, tier.cache, salted=False)
    return announcer


STDIN = 0
OWN_INBOX = "inproc://inbox"  # the same, for threads of this process
BEAT_SECONDS = 0.5  # between signs of life


class Channel:
    """Both directions, one msgpack message a frame. The engine binds, the server connects."""

    def __init__(self, spec: EngineSpec) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        # One for all threads: messages of two sockets arrive in any order.
        self._to_self = self._context.socket(zmq.PUSH)
        for socket in (self._inbox, self._outbox, self._to_self):
            socket.set_hwm(0)  # the scheduler bounds its own queue
        self._inbox.bind(spec.inbox)
        self._inbox.bind(OWN_INBOX)
        self._to_self.connect(OWN_INBOX)
        self._outbox.bind(spec.outbox)
        self._sending = threading.Lock()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        """From any thread."""
        frame = msgspec.msgpack.encode(message)
        with self._sending:
            self._outbox.send(frame)

    def receive(self, wait_seconds: float) -> list[ToEngine]:
        """Everything that has arrived; the first of it may take `wait_seconds`."""
        if wait_seconds:
            self._inbox.poll(int(wait_seconds * 1000))
        messages: list[ToEngine] = []
        with contextlib.suppress(zmq.Again):
            while True:
                messages.append(self._decoder.decode(self._inbox.recv(zmq.NOBLOCK)))
        return messages

    def deliver(self, message: ToEngine) -> None:
        """From any thread of this process, in this order; dropped once the channel is closed."""
        frame = msgspec.msgpack.encode(message)
        with self._sending:
            if not self._to_self.closed:
                self._to_self.send(frame)

    def close(self) -> None:
        with self._sending:
            self._context.destroy(linger=200)


IDLE_SECONDS = 0.5  # of a turn in which no message arrives


class MessagePump:
    """Moves messages between channel and loop until a Shutdown arrives, or the loop fails."""

    def __init__(
        self,
        loop: Loop,
        channel: Channel,
        announcer: Announcer | None = None,
    ) -> None:
        self._loop = loop
        self._channel = channel
        self._announcer = announcer
        self._events = EventSender(loop, channel.send)
        loop.on_start = lambda ids: channel.send(Started(ids))
        loop.scheduler.grammars.on_compiled = lambda ids: channel.send(Compiled(ids))
        self.turn_began = time.monotonic()

    def run(self) -> None:
        while self._take_in(self._wait_seconds):
            self.turn_began = time.monotonic()
            if self._events.watched:
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
                    later = functools.partial(self._send_answer, id)
                    self._answer(id, functools.partial(self._loop.flush_cache, later))
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
            self._channel.send(Answer(id, {}, f"the engine could not answer: {error!r}"))
            return
        if found is not None:
            self._send_answer(id, found)

    def _send_answer(self, id: str, found: dict[str, Any]) -> None:
        self._channel.send(Answer(id, found))


@contextlib.contextmanager
def signs_of_life(pump: MessagePump, channel: Channel) -> Iterator[None]:
    """From a thread: a step may take long, and a process that is frozen has no threads either."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_SECONDS):
            channel.send(Alive(time.monotonic() - pump.turn_began))

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def leave_with_server(spec: EngineSpec, channel: Channel, serving: threading.Event) -> None:
    """Wait for the server's end of stdin to close, then stop the loop, by force if it hangs."""
    while os.read(STDIN, 1):  # unbuffered: a thread in a buffered read would block our exit
        pass
    if serving.is_set():  # a load need not be ended in good order
        channel.deliver(Shutdown())
        time.sleep(EXIT_GRACE_SECONDS)
    spec.remove_sockets()
    os._exit(1)


def run_engine(loop: Loop, channel: Channel, announcer: Announcer | None = None) -> int:
    """Run until a Shutdown; report any other end to the server. Returns the exit status."""
    pump = MessagePump(loop, channel, announcer)
    try:
        with signs_of_life(pump, channel):
            pump.run()
    except Exception as error:  # nothing is known of the state it left: no request can go on
        traceback.print_exc()
        channel.send(Failed(f"the engine stopped: {str(error) or repr(error)}"))
        return 1
    loop.close()
    return 0


def keep_torch_out() -> None:
    """Old tokenizers are read by transformers, which imports torch too: a second or more."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # now as if not installed


def main() -> int:
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineSpec)
    configure_logging(spec.config.server.log_format)
    if spec.config.model.backend == "mlx":
        keep_torch_out()
    gc.disable()  # while it loads: a collection over a library's objects takes half a second
    serving = threading.Event()
    channel = Channel(spec)  # first: `leave_with_server` removes its sockets
    threading.Thread(target=leave_with_server, args=(spec, channel, serving), daemon=True).start()
    try:
        server = spec.config.server
        log = StepLog(Path(server.step_log)) if server.step_log is not None else None
        loop = build_loop(spec.config, lambda stage: channel.send(Loading(stage)), stays=True)
        loop.scheduler.metrics.log = log
        compiler = loop.scheduler.compiler
        if compiler is not None:
            compiler.start_loading()
        listener = listen(spec.config, loop, channel.deliver)
        events = publish_events(server, loop.scheduler, spec.replica or 0)
        listeners: list[Listener] = [] if events is None else [events]
        if spec.replica is not None and loop.scheduler.cache is not None:
            rules = loop.scheduler.cache.rules
            listeners.append(prefix_reports(rules, channel.send))
        announcer = announce(loop.scheduler, listeners)
    except PippinError as error:
        channel.send(Failed(error.message))
        channel.close()
        return 1
    except Exception as error:  # whatever a checkpoint can make a library raise
        traceback.print_exc()
        channel.send(Failed(f"could not load {spec.config.model.model}: {error}"))
        channel.close()
        return 1
    loop.warm_up.run_at_load(lambda stage: channel.send(Loading(stage)))
    if compiler is not None:
        channel.send(Loading("the vocabulary, for grammars"))
        compiler.load()
    # A full collection over all that loading made takes a tenth of a second: every stream stops.
    gc.collect()
    gc.freeze()
    gc.enable()
    model = loop.backend.spec
    speculation = loop.scheduler.speculation
    takes_predictions = speculation is not None and speculation.drafter is not None
    num_slots = loop.scheduler.slots.num_slots
    channel.send(Ready(model.vocab_size, model.max_len, takes_predictions, num_slots))
    serving.set()
    if events is not None:
        events.start()
    status = run_engine(loop, channel, announcer)
    if listener is not None:
        listener.close()
    if events is not None:
        events.close()
    if log is not None:
        log.close()
    channel.close()
    spec.remove_sockets()
    return status


if __name__ == "__main__":
    sys.exit(main())
