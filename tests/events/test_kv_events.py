"""KV events: what they say is what is cached, in both forms, to late and slow subscribers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import zmq

from builders import Client, make_loop, make_prompt
from cases import cases
from events.kv_router import ArrayBatch, Batch, Router, hashes_of
from memory_store import MemoryStore
from pippin.backends.fake import FakeBackend
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tree.components import STATE, WINDOW
from pippin.cache.tree.radix import as_tokens
from pippin.config import ServerConfig
from pippin.engine import kv_events as event_publisher
from pippin.engine.kv_events import (
    Announcer,
    BlockIndex,
    EventForm,
    EventPublisher,
    FormName,
    PublishingThread,
)
from pippin.engine.run import publish_events
from pippin.errors import ConfigError
from pippin.types import GRID, Component

A, W, S = Component.ATTENTION, Component.WINDOW, Component.STATE
SALT = b"s" * 32


class Batches(EventPublisher):
    """Delivers to a router in this process."""

    def __init__(self, router: Router) -> None:
        self.router = router

    def publish(self, batch: bytes) -> None:
        self.router.take(batch)

    def answer(self) -> None:
        pass

    def close(self) -> None:
        pass


class Announced:
    """A client whose events reach routers in this process, when a test says so."""

    def __init__(self, client: Client, *forms: FormName) -> None:
        scheduler = client.loop.scheduler
        assert scheduler.cache is not None
        tree = scheduler.cache
        self.announcer = Announcer()
        self.threads: list[PublishingThread] = []  # that are not started
        self.routers: list[Router] = []
        for form in forms or ("vllm",):
            self.routers.append(Router(Batch if form == "vllm" else ArrayBatch))
            publisher = Batches(self.routers[-1])
            self.threads.append(PublishingThread(EventForm(form, tree.rules), publisher))
            self.announcer.add(self.threads[-1])
        self.announcer.observe("memory", tree)
        for tier, _ in scheduler.tiers:
            self.announcer.observe(tier.kind.name, tier.cache, salted=False)

    def turn(self) -> None:
        self.announcer.collect()
        for thread in self.threads:
            thread.turn()


def announce(client: Client) -> tuple[Announced, Router]:
    announcer = Announced(client)
    announcer.turn()
    return announcer, announcer.routers[0]


def random_prompt(rng: random.Random, past: list[list[int]]) -> list[int]:
    """Random tokens behind a random part of an earlier prompt."""
    shared = rng.choice(past) if past and rng.random() < 0.8 else []
    shared = shared[: rng.choice([len(shared), rng.randrange(len(shared) + 1)])][:512]
    return shared + [rng.randrange(97) for _ in range(rng.choice([1, 7, 64, 130]))]


def restorable_blocks(cache: PrefixCache, prompt: list[int], salt: bytes) -> int:
    """Tokens of the longest part of a prompt in whole blocks that the cache can restore as it is,
    the prompt's last token not among them."""
    ends = range((len(prompt) - 1) // GRID * GRID, 0, -GRID)
    return next((end for end in ends if cache.probe(prompt, salt, limit=end) == end), 0)


LAYOUTS = {"A": (A,), "AW": (A, W), "AS": (A, S), "AWS": (A, W, S), "S": (S,)}


@cases("deterministic", [False, True], ids=["", "deterministic"])
@cases("layout", LAYOUTS)
def test_predicted_is_cached(layout: str, deterministic: bool) -> None:
    """For 100 prompts each, with evictions and salts.

    Where a prompt can be restored at every token, and where it is restored in whole blocks alone
    (deterministic), a router predicts `cached_tokens`, rounded down to blocks. Else checkpoints may
    lie inside of blocks: it predicts the longest prefix in whole blocks that can be restored.
    """
    rng = random.Random(layout)
    backend = FakeBackend(components=LAYOUTS[layout], window=100, state_tokens=40, num_slots=4)
    capacity = backend.row_bytes(1500) + 8 * backend.spec.state_bytes
    loop = make_loop(backend=backend, capacity_bytes=capacity, deterministic=deterministic)
    client = Client(loop)
    announcer, router = announce(client)
    cache = client.loop.scheduler.cache
    assert cache is not None
    past: list[list[int]] = []
    num_hits = num_rounded = 0
    for _ in range(100):
        prompt, salt = random_prompt(rng, past), rng.choice([b"", b"", SALT])
        announcer.turn()
        predicted = router.predict(prompt, salt)
        restorable = restorable_blocks(cache, prompt, salt)
        reply = client.ask(prompt, salt=salt, max_tokens=rng.choice([1, 1, 2, 2, 2, 70]))
        past = [*past, prompt + reply.tokens][-8:]
        assert reply.cached_tokens is not None
        cached = min(reply.cached_tokens, len(prompt) - 1)
        assert predicted == restorable <= cached
        if deterministic or layout == "A":
            assert predicted == cached - cached % GRID
        num_hits += predicted > 0
        num_rounded += predicted == cached - cached % GRID
    assert num_hits >= 10
    assert num_rounded >= 60
    assert cache.stats.bytes_evicted


def test_arrays_name_the_blocks_of_the_maps() -> None:
    """SGLang's form has no groups: what can be restored further on is counted as well."""
    client = Client(make_loop(components=(A, S)))
    announcer = Announced(client, "vllm", "sglang")
    maps, arrays = announcer.routers
    prompt = make_prompt(300)
    client.ask(prompt, salt=SALT)
    announcer.turn()
    assert arrays.blocks["GPU", 0] == maps.blocks["GPU", 0]
    assert maps.predict(prompt, SALT) == arrays.predict(prompt, SALT) == 256
    _, *stored = arrays.events
    assert [one for event in stored for one in event.block_hashes] == hashes_of(prompt, SALT)
    assert [token for event in stored for token in event.token_ids] == prompt[:256]


def test_a_prefix_without_a_checkpoint_is_not_announced() -> None:
    client = Client(make_loop(components=(A, S)))
    announcer, router = announce(client)
    cache = client.loop.scheduler.cache
    assert cache is not None
    prompt = make_prompt(300)
    client.ask(prompt)
    announcer.turn()
    assert router.predict(prompt) == 256
    path, _ = cache.radix.walk(as_tokens(prompt))
    for node in path:
        cache.drop(node, STATE)
    assert cache.num_cached(prompt) == 300, "its attention KV is still there"
    announcer.turn()
    assert router.predict(prompt) == 0
    assert not any(router.blocks.values())


def test_no_window_may_reach_back_to_one_that_was_evicted() -> None:
    backend = FakeBackend(components=(A, W), window=100, knows_head=False)
    client = Client(make_loop(backend=backend))
    announcer, router = announce(client)
    cache = client.loop.scheduler.cache
    assert cache is not None
    prompt = make_prompt(400)
    client.ask(prompt)
    client.ask([*prompt[:150], 1, 2, 3])
    announcer.turn()
    assert router.predict(prompt) == 384
    path, _ = cache.radix.walk(as_tokens(prompt))
    (above,) = (node for node in path if node.end == 150)
    cache.drop(above, WINDOW)
    announcer.turn()
    assert router.predict(prompt) == 384
    for length in (129, 200, 256, 257, 300):  # from 250 on none reaches back to it
        part = prompt[:length]
        assert router.predict(part) == restorable_blocks(cache, part, b"")
        assert router.predict(part) == (256 if length > 256 else 128)


def test_a_salted_prefix_is_not_confused_with_a_plain_one() -> None:
    client = Client(make_loop(components=(A,)))
    announcer, router = announce(client)
    prompt = make_prompt(200)
    client.ask(prompt, salt=SALT)
    announcer.turn()
    assert router.predict(prompt) == router.predict(prompt, b"t" * 32) == 0
    assert router.predict(prompt, SALT) == 192
    _, first, *others = router.events
    assert first.extra_keys[0] == (SALT.hex(),)
    assert all(event.parent_block_hash is not None for event in others)


def test_a_flushed_cache_is_cleared_by_one_event() -> None:
    client = Client(make_loop(components=(A, S)))
    announcer, router = announce(client)
    client.ask(make_prompt(200))
    client.ask(make_prompt(200, family=1))
    announcer.turn()
    assert any(router.blocks.values())
    assert router.num_cleared == 1, "at start: an engine before may have announced others"
    client.loop.flush_cache()
    num_events = len(router.events)
    announcer.turn()
    assert router.num_cleared == 2
    assert len(router.events) == num_events + 1


def test_what_is_evicted_and_cached_again_did_not_change() -> None:
    client = Client(make_loop(components=(A,)))
    announcer, router = announce(client)
    cache = client.loop.scheduler.cache
    assert cache is not None
    client.ask(make_prompt(200))
    announcer.turn()
    num_events = len(router.events)
    assert cache.evict(cache.nbytes)
    assert not cache.radix.num_nodes
    client.ask(make_prompt(200))
    announcer.turn()
    assert len(router.events) == num_events


def test_what_was_flushed_is_gone_at_once_and_what_is_cached_again_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long it takes to free what was flushed."""
    monkeypatch.setattr("pippin.scheduler.traffic.MAX_FLUSHED", 1)
    client = Client(make_loop(components=(A, S)))
    announcer, router = announce(client)
    cache = client.loop.scheduler.cache
    assert cache is not None
    prompts = [make_prompt(200, family) for family in range(4)]
    for prompt in prompts:
        client.ask(prompt)
    announcer.turn()
    client.loop.flush_cache()
    announcer.turn()
    assert cache.flushing
    assert not any(router.blocks.values())
    reply = client.submit(prompts[0])
    while reply.finish is None:
        client.step()
        announcer.turn()
        assert router.predict(prompts[0]) == restorable_blocks(cache, prompts[0], b"")
    while cache.flushing:
        client.loop.step()
    announcer.turn()
    assert [router.predict(prompt) for prompt in prompts] == [192, 0, 0, 0]


def test_tiers_are_media() -> None:
    store = MemoryStore(b"f" * 32, 1 << 30)
    client = Client(make_loop(components=(A, S), store=store))
    announcer, router = announce(client)
    prompt = make_prompt(320)
    client.ask(prompt)
    client.ask(prompt, salt=SALT)
    client.loop._write_behind()
    announcer.turn()
    turn = [*prompt, 1]
    assert router.predict(turn, medium="STORAGE") == router.predict(turn) == 320
    assert router.predict(turn, SALT) == 320
    assert router.predict(turn, SALT, medium="STORAGE") == 0, "a disk knows no salts"
    _, later = announce(Client(make_loop(components=(A, S), store=store)))
    assert later.predict(turn, medium="STORAGE") == 320, "what was there before"


@pytest.mark.parametrize("broken", [(BlockIndex, "take_changes"), (EventForm, "events")])
def test_a_failure_ends_the_events_and_not_the_engine(
    broken: tuple[type, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(make_loop(components=(A,)))
    announcer, router = announce(client)
    (thread,) = announcer.threads
    monkeypatch.setattr(*broken, None)
    thread.start()
    client.ask(make_prompt(200))
    announcer.announcer.collect()
    if broken[0] is EventForm:
        thread._thread.join()
    thread.close()
    assert "KV events failed" in caplog.text
    assert client.ask(make_prompt(200)).finish == "length"
    announcer.announcer.collect()
    assert thread._queue.empty(), "and nothing is gathered any more"
    assert router.num_cleared == 2


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
