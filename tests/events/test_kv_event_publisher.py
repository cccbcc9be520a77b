"""KV events over sockets: sequence numbers, replay, and subscribers that do not read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from builders import Client, make_loop, make_prompt
from events.kv_router import Router
from pippin.config import ServerConfig
from pippin.engine import kv_events as event_publisher
from pippin.engine.kv_events import Announcer, EventForm, EventPublisher, PublishingThread
from pippin.engine.run import publish_events
from pippin.errors import ConfigError
from pippin.types import Component

ANY_PORT = "tcp://127.0.0.1:0"
POLL_MS = 20
MANY = 500  # polls


class Sockets:
    """Of clients."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self._open: list[zmq.Socket[bytes]] = []

    def connect(self, kind: int, address: str, **options: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        self._open.append(socket)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"kv-events")
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.connect(address)
        return socket

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.close()


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    publisher = EventPublisher(ANY_PORT, ANY_PORT)
    yield publisher
    publisher.close()


def replay(publisher: EventPublisher, client: zmq.Socket[bytes], first: bytes) -> list[bytes]:
    """The batches that are sent again; [] also where nothing is."""
    client.send_multipart((b"", first))
    found: list[bytes] = []
    for _ in range(MANY):
        publisher.answer()
        while client.poll(POLL_MS):
            _, topic, number, batch = client.recv_multipart()
            if number == b"\xff" * 8:
                assert (topic, batch) == (b"", b"")
                return found
            assert topic == b"kv-events"
            assert int.from_bytes(number, "big") == int(batch)
            found.append(batch)
    raise AssertionError("a replay did not end")


def number(value: int) -> bytes:
    return value.to_bytes(8, "big")


def test_a_late_subscriber_gets_what_it_missed(sockets: Sockets, publisher: EventPublisher) -> None:
    address, replay_address = publisher.addresses
    for value in range(3):
        publisher.publish(b"%d" % value)
    sub = sockets.connect(zmq.SUB, address)
    sent = 3
    while not sub.poll(POLL_MS):
        publisher.publish(b"%d" % sent)
        sent += 1
        assert sent < MANY
    topic, first, batch = sub.recv_multipart()
    assert topic == b"kv-events"
    assert first == number(int(batch))
    client = sockets.connect(zmq.DEALER, replay_address)
    assert replay(publisher, client, number(0)) == [b"%d" % value for value in range(sent)]
    assert replay(publisher, client, number(sent - 1)) == [b"%d" % (sent - 1)]
    assert replay(publisher, client, number(sent)) == []


def test_what_can_be_sent_again_is_bounded(
    sockets: Sockets,
    publisher: EventPublisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_publisher, "MAX_PAST", 5)
    for value in range(20):
        publisher.publish(b"%d" % value)
    client = sockets.connect(zmq.DEALER, publisher.addresses[1])
    assert replay(publisher, client, number(0)) == [b"%d" % value for value in range(15, 20)]
    monkeypatch.setattr(event_publisher, "MAX_PAST_BYTES", 6)
    publisher.publish(b"20")
    assert len(publisher._past) == 3, "six bytes"


def test_what_is_no_request_is_dropped(sockets: Sockets, publisher: EventPublisher) -> None:
    publisher.publish(b"0")
    client = sockets.connect(zmq.DEALER, publisher.addresses[1])
    hostile = [(b"",), (b"", b"1"), (b"", b"", b""), (b"x", number(0)), (b"", b"\xff" * 9)]
    for frames in hostile:
        client.send_multipart(frames)
    assert replay(publisher, client, number(0)) == [b"0"]
    huge = sockets.connect(zmq.DEALER, publisher.addresses[1])
    huge.send_multipart((b"", bytes(event_publisher.MAX_REQUEST_BYTES + 1)))  # it is disconnected
    assert replay(publisher, client, number(0)) == [b"0"]


def test_a_subscriber_that_does_not_read_costs_nothing(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_publisher, "MAX_UNREAD", 3)
    publisher = EventPublisher(ANY_PORT)
    slow = sockets.connect(zmq.SUB, publisher.addresses[0], RCVHWM=1)
    batch = bytes(1 << 16)
    for _ in range(MANY):
        publisher.publish(batch)  # returns, whether it is read or not
        if slow.poll(POLL_MS):
            break
    for _ in range(300):
        publisher.publish(batch)
    publisher.close()


def test_an_address_in_use_is_refused(publisher: EventPublisher) -> None:
    with pytest.raises(ConfigError, match=r"kv_events_replay is tcp.* use an address"):
        EventPublisher(ANY_PORT, publisher.addresses[0])


@pytest.mark.parametrize(
    "wrong", ["5557", "tcp://127.0.0.1", "tcp://a:0", "tcp://a:70000", "ipc://x", "tcp://a b:1"]
)
def test_a_wrong_address_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_events is .* use tcp://HOST:PORT"):
        ServerConfig(kv_events=wrong)


def test_options_that_require_others_say_so() -> None:
    with pytest.raises(ConfigError, match="kv_events_replay requires --kv-events"):
        ServerConfig(kv_events_replay="tcp://*:5558")
    without_cache = make_loop(cache=False).scheduler
    with pytest.raises(ConfigError, match="kv_events requires the prefix cache"):
        publish_events(ServerConfig(kv_events="tcp://127.0.0.1:5557"), without_cache)


def test_a_router_follows_an_engine(sockets: Sockets) -> None:
    """Over sockets, from the announcer's own thread."""
    publisher = EventPublisher(ANY_PORT, ANY_PORT)
    _, replay_address = publisher.addresses
    client = Client(make_loop(components=(Component.ATTENTION, Component.STATE)))
    cache = client.loop.scheduler.cache
    assert cache is not None
    thread = PublishingThread(EventForm("vllm", cache.rules), publisher)
    announcer = Announcer()
    announcer.add(thread)
    announcer.observe("memory", cache)
    thread.start()
    prompt = make_prompt(500)
    client.ask(prompt)
    announcer.collect()
    router = Router()
    dealer = sockets.connect(zmq.DEALER, replay_address)
    for _ in range(MANY):  # the first batches may have been too early for a replay
        router = Router()
        dealer.send_multipart((b"", number(0)))
        while (frames := dealer.recv_multipart())[3]:
            router.take(frames[3])
        if router.predict(prompt) == 448:
            break
    assert router.predict(prompt) == 448
    assert client.ask(prompt[:480]).cached_tokens == 448
    thread.close()
