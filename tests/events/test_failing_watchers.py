"""What only looks on fails alone: the engine's replies are the same, and somebody is told once."""

from __future__ import annotations

import logging

import pytest
from replica import Watched

from builders import Client, check_idle, make_client, make_prompt, oracle
from pippin.engine.events import tree_mirror as tree
from pippin.engine.events.event_sender import EventSender, Recorder
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
