"""What changed in memory is served to nobody: it is dropped, counted, and computed again."""

from __future__ import annotations

import pytest

from builders import (
    ALL,
    AMPLE_BYTES,
    Client,
    ToyGrammar,
    check_idle,
    make_loop,
    make_prompt,
    oracle,
)
from cases import cases
from damage import damage
from integrity import check_integrity
from memory_store import MemoryStore
from pippin.backends.fake import FakeBackend
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tree.canary import CacheCorruption, Canary
from pippin.types import Component
from simulator import Workers

A, W, S, H = Component
LAYOUTS = [ALL, (A,), (A, S), (A, W), (S,), (W, S), (W,)]
CASES = [(layout, c) for layout in LAYOUTS for c in (*layout, H)]
both_modes = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
both_ways = pytest.mark.parametrize("by_reference", [False, True], ids=["copied", "by reference"])
ORDER = (A, W, S, H)


def make_client(
    components: tuple[Component, ...] = ALL,
    *,
    overlap: bool = True,
    by_reference: bool = False,
    **kw: object,
) -> Client:
    backend = FakeBackend(components=components, num_slots=256, restores_by_reference=by_reference)
    return Client(make_loop(backend=backend, overlap=overlap, **kw))


def cache_of(client: Client) -> PrefixCache:
    cache = client.loop.scheduler.cache
    assert cache is not None
    return cache


def damage_all(client: Client, component: Component) -> int:
    """In how many nodes there was something to damage."""
    held = [node.payloads[ORDER.index(component)] for node in cache_of(client).radix.nodes()]
    found = [payload for payload in held if payload is not None]
    for payload in found:
        damage(payload)
    return len(found)


@both_modes
@both_ways
@cases(("components", "component"), CASES)
def test_damage_costs_a_hit_and_no_token(
    components: tuple[Component, ...], component: Component, overlap: bool, by_reference: bool
) -> None:
    client = make_client(components, overlap=overlap, by_reference=by_reference)
    prompt = make_prompt(200)
    expected = oracle(prompt, components=components, max_tokens=30)
    assert client.ask(prompt, max_tokens=30).tokens == expected[0]
    assert damage_all(client, component) > 0
    for _ in range(2):
        reply = client.ask(prompt, max_tokens=30)
        assert (reply.tokens, reply.finish) == expected
    assert cache_of(client).stats.damaged > 0
    assert cache_of(client).counters()["damaged"] == cache_of(client).stats.damaged
    check_idle(client)
    check_integrity(cache_of(client))
    counted = cache_of(client).stats.damaged
    last = client.ask(prompt, max_tokens=30)
    assert last.tokens == expected[0]
    assert last.cached_tokens == len(prompt)
    assert cache_of(client).stats.damaged == counted, "it is counted once"


@both_modes
def test_a_reply_says_that_its_prompt_was_computed_after_all(overlap: bool) -> None:
    client = make_client((A, S), overlap=overlap)
    prompt = make_prompt(200)
    client.ask(prompt)
    damage_all(client, S)
    longer = [*prompt, *make_prompt(9, 3)]
    reply = client.ask(longer)
    assert reply.tokens == oracle(longer, components=(A, S))[0]
    assert reply.cached_tokens == 0


@both_modes
@both_ways
def test_others_that_run_on_what_is_damaged_later_go_on(overlap: bool, by_reference: bool) -> None:
    client = make_client((A, S), overlap=overlap, by_reference=by_reference)
    prompt = make_prompt(200)
    client.ask(prompt, max_tokens=1)
    first = client.submit([*prompt, 5, 6], max_tokens=60)
    client.step(10)
    damage_all(client, A)
    second = client.submit([*prompt, 7, 8], max_tokens=10)
    third = client.submit([*prompt, 7, 9], max_tokens=10, grammar=ToyGrammar(3))
    client.run()
    assert first.tokens == oracle([*prompt, 5, 6], components=(A, S), max_tokens=60)[0]
    assert second.tokens == oracle([*prompt, 7, 8], components=(A, S), max_tokens=10)[0]
    expected = oracle([*prompt, 7, 9], components=(A, S), max_tokens=10, grammar=ToyGrammar(3))
    assert third.tokens == expected[0]
    check_idle(client)
    check_integrity(cache_of(client))
    assert not any(node.damaged for node in cache_of(client).radix.nodes())


def test_what_is_damaged_is_not_written_to_disk() -> None:
    store, workers = MemoryStore(b"test", AMPLE_BYTES), Workers()
    client = make_client((A, S), store=store, workers=workers)
    prompt = make_prompt(300)
    reply = client.submit(prompt, max_tokens=40)
    while not cache_of(client).radix.num_tokens:
        client.step(1)
    damage_all(client, A)
    while client.loop.scheduler.has_work:
        workers.advance(10)
        client.step(1)
    assert reply.tokens == oracle(prompt, components=(A, S), max_tokens=40)[0]
    assert cache_of(client).stats.damaged > 0
    again = make_client((A, S), store=store, workers=workers)
    late = again.submit(prompt, max_tokens=40)
    while late.finish is None:
        workers.advance(10)
        again.step(1)
    assert late.tokens == reply.tokens


def test_a_canary_that_raises_ends_the_engine_with_the_entrys_place() -> None:
    client = make_client((A, S), canary=Canary("log"))
    prompt = make_prompt(100)
    client.ask(prompt)
    damage_all(client, S)
    assert client.ask(prompt).tokens == oracle(prompt, components=(A, S))[0]
    client = make_client((A, S), canary=Canary("raise"))
    client.ask(prompt)
    damage_all(client, S)
    with pytest.raises(CacheCorruption, match="state bytes that have changed"):
        client.ask(prompt)
