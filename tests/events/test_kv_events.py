"""KV events: what a router infers from them is what the engine restores. No sockets here."""

from __future__ import annotations

import random

import pytest

from builders import Client, make_loop, make_prompt
from cases import cases
from events.kv_router import ArrayBatch, Batch, Router, hashes_of
from memory_store import MemoryStore
from pippin.backends.fake import FakeBackend
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tree.components import STATE, WINDOW
from pippin.cache.tree.radix import as_tokens
from pippin.engine.kv_events import (
    Announcer,
    BlockIndex,
    EventForm,
    EventPublisher,
    FormName,
    PublishingThread,
)
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
