"""What only looks on fails alone: the engine's replies are the same, and somebody is told once."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from replica import Watched

from builders import Client, check_idle, make_client, make_prompt, oracle
from pippin.engine.events import recorder as tree
from pippin.engine.events.event_sender import EventSender
from pippin.engine.events.recorder import Recorder
from pippin.engine.events.schema import RequestEvent, StepEvent
from pippin.engine.events.trace import TraceFile, TraceWriter
from pippin.engine.run import MessagePump
from pippin.messages import (
    FeedMessage,
    FromEngine,
    Shutdown,
    Submit,
    ToEngine,
    TokenBatch,
    Watch,
    pack_tokens,
)
from pippin.types import SamplingParams


class Sink:
    """A consumer that raises when it is told the `fails_at`-th thing of one kind."""

    def __init__(self, fails_on: str = "", fails_at: int = 1) -> None:
        self.fails_on = fails_on
        self.fails_at = fails_at
        self.num_told = {"step": 0, "request": 0}
        self.num_lost = 0

    def step(self, step: StepEvent) -> None:
        self._tell("step")

    def request(self, request: RequestEvent) -> None:
        self._tell("request")

    def lost(self) -> None:
        self.num_lost += 1

    def _tell(self, kind: str) -> None:
        assert not self.num_lost, "told something after it failed"
        self.num_told[kind] += 1
        if kind == self.fails_on and self.num_told[kind] == self.fails_at:
            raise RuntimeError(f"a consumer's own bug in {kind}")


def converse(client: Client) -> None:
    """Some requests, one after the other and together; their replies are as always."""
    asked = [client.submit(make_prompt(90 + 40 * n, n % 2), max_tokens=6) for n in range(4)]
    client.run()
    for reply in asked:
        assert reply.tokens == oracle(reply.prompt, max_tokens=6)[0]
    client.ask(make_prompt(120))
    check_idle(client)


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("kind", ["step", "request"])
@pytest.mark.parametrize("fails_at", [1, 5])
def test_a_consumer_that_raises_is_told_nothing_more_and_others_everything(
    kind: str, fails_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(num_slots=2, chunk=64)
    recorder = Recorder(client.loop.scheduler)
    broken, sound = Sink(kind, fails_at), Sink()
    recorder.add(broken)
    recorder.add(sound)
    converse(client)
    assert broken.num_lost == 1
    assert broken.num_told[kind] == fails_at
    assert sound.num_told["step"] == client.loop.scheduler.metrics.steps
    assert tracebacks(caplog) == ["Sink failed and gets no more events"]
    assert client.loop.status()["metrics"]["watch_failures"] == 1
    recorder.remove(sound)
    assert client.loop.scheduler.observer is None


@pytest.mark.parametrize(
    "broken",
    [
        (Recorder, "_request_event"),
        (Recorder, "_step_event"),
        (EventSender, "step"),
        (EventSender, "request"),
        (EventSender, "_frame"),
        (EventSender, "_memory"),
        (tree.TreeMirror, "_show"),
        (tree.TreeMirror, "_show_path"),
        (tree.TreeMirror, "_forget"),
        (tree.TreeMirror, "changes"),
    ],
    ids=lambda broken: f"{broken[0].__name__}.{broken[1]}",
)
def test_a_feed_that_raises_anywhere_is_over_and_says_so(
    broken: tuple[type, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(num_slots=2, chunk=64)
    client.ask(make_prompt(70))
    one = Watched(client)
    one.feed.watch()
    assert one.flush() == 1

    def fail(*args: object) -> None:
        raise KeyError("a bug of ours")

    monkeypatch.setattr(*broken, fail)
    converse_and_flush(one)
    assert [message.kind for message in one.messages if message.kind == "lost"] == ["lost"]
    assert len(tracebacks(caplog)) == 1
    assert client.loop.scheduler.metrics.watch_failures == 1
    assert client.loop.scheduler.observer is None
    assert client.loop.scheduler.cache is not None
    assert not client.loop.scheduler.cache.observers
    one.messages.clear()
    one.feed.watch()  # somebody else comes, and learns it at once
    assert [message.kind for message in one.messages] == ["lost"]
    one.feed.unwatch()
    assert len(tracebacks(caplog)) == 1


def converse_and_flush(one: Watched) -> None:
    client = one.client
    asked = client.submit(make_prompt(150), max_tokens=6)
    while not client.loop.idle:
        client.step()
        one.now += 1.0
        one.feed.flush()
    assert asked.tokens == oracle(asked.prompt, max_tokens=6)[0]
    client.loop.flush_cache()
    one.now += 1.0
    one.feed.flush()
    converse(client)
    one.now += 1.0
    one.feed.flush()


def test_a_feed_that_cannot_begin_is_lost(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no tree for you")

    one = Watched(make_client())
    monkeypatch.setattr(tree, "_used_last", fail)
    one.feed.watch()
    assert one.messages == [FeedMessage("lost", b"")]
    assert len(tracebacks(caplog)) == 1
    converse(one.client)


def test_a_trace_that_raises_is_closed_and_can_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    TraceFile.begin(path)
    client = make_client(num_slots=2)
    writer = TraceWriter(TraceFile(path), Recorder(client.loop.scheduler), num_slots=2)
    client.ask(make_prompt(70))

    def fail(*args: object) -> None:
        raise ValueError("a bug of ours")

    monkeypatch.setattr(writer, "_follow", fail)
    converse(client)
    writer.close()
    assert any(event["name"].startswith("step") for event in json.loads(path.read_bytes()))
    assert len(tracebacks(caplog)) == 1
    assert client.loop.scheduler.metrics.watch_failures == 1


class Wire:
    """One batch of messages to the engine, then the order to stop once it has answered."""

    def __init__(self, *messages: ToEngine) -> None:
        self.inbox = list(messages)
        self.sent: list[FromEngine] = []

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    def receive(self, wait_seconds: float) -> list[ToEngine]:
        taken, self.inbox = self.inbox, []
        ended = [
            delta
            for message in self.sent
            if isinstance(message, TokenBatch)
            for delta in message.deltas
            if delta.finish is not None
        ]
        return [Shutdown()] if ended else taken


def test_the_pump_goes_on_when_the_feed_has_failed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(EventSender, "_load", fail)
    submit = Submit(
        "r0", pack_tokens(make_prompt(40)), SamplingParams(max_tokens=3, ignore_eos=True)
    )
    wire = Wire(Watch(), submit)
    with caplog.at_level(logging.ERROR):
        MessagePump(make_client().loop, wire).run()
    kinds = [message.kind for message in wire.sent if isinstance(message, FeedMessage)]
    assert kinds == ["lost"]
    assert len(tracebacks(caplog)) == 1
    deltas = [d for m in wire.sent if isinstance(m, TokenBatch) for d in m.deltas]
    assert deltas[-1].finish == "length"
