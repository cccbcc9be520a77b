"""Prompts that come back from the host's memory: alone, over a disk, and when things go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from builders import Client, Reply, check_idle, make_loop, make_prompt, oracle
from memory_store import MemoryStore
from pippin.backends.fake import FakeBackend
from pippin.cache.entries import Bytes, Entry
from pippin.cache.host_store import HostStore
from pippin.cache.tiers.tier_io import plain_memory
from pippin.types import Component
from simulator import Workers

A, W, S = Component.ATTENTION, Component.WINDOW, Component.STATE
LAYOUTS = [(A,), (A, S), (A, W), (A, W, S), (S,), (W, S)]
IDS = ["-".join(c.value for c in layout) for layout in LAYOUTS]
BATCH_BYTES = 8_192


def make_host(max_bytes: int = 1 << 20) -> HostStore:
    return HostStore(max_bytes, plain_memory, BATCH_BYTES)


def start(host: HostStore | None, disk: MemoryStore | None = None, **kwargs: Any) -> Client:
    """Its model is slow: whatever is below memory is worth a load."""
    client = Client(make_loop(host=host, store=disk, batch_bytes=BATCH_BYTES, **kwargs))
    client.loop.scheduler.pace.compute_seconds = lambda tokens: 1.0 * tokens  # type: ignore[method-assign]
    return client


def told(client: Client, tier: str = "host") -> dict[str, Any]:
    return dict(client.loop.counters()[tier])


def empty_memory(client: Client) -> None:
    assert client.loop.scheduler.cache is not None
    client.loop.scheduler.cache.flush()


@pytest.mark.slow
def test_under_pressure_prompts_come_back_and_the_ceiling_holds() -> None:
    host = make_host(1 << 16)
    client = start(host, capacity_bytes=FakeBackend().row_bytes(700) * 3)
    prompts = [make_prompt(400, family) for family in range(30)]
    for prompt in [*prompts, *prompts[::-1], *prompts]:
        assert client.ask(prompt).tokens == oracle(prompt)[0]
        assert host.counters().bytes <= 1 << 16
    counted = host.counters()
    assert counted.evicted > 0
    assert told(client)["loads"] > 10
    assert not any(area.num_readers for area in host._areas), "something lent was not given back"
    check_idle(client)


def test_the_host_comes_first_and_the_disk_adds_what_it_lacks() -> None:
    disk, prompt = MemoryStore(b"toy", 1 << 30), make_prompt(600)
    before = start(None, disk)
    first = before.ask(prompt)
    before.loop.close()
    client = start(make_host(), disk)
    part = client.ask(prompt[:300])
    assert (part.host_tokens, part.disk_tokens) == (0, part.cached_tokens)
    empty_memory(client)
    whole = client.ask(prompt)
    assert whole.tokens == first.tokens
    assert whole.host_tokens >= 256
    assert whole.disk_tokens >= 256
    assert whole.host_tokens + whole.disk_tokens == whole.cached_tokens == 600
    empty_memory(client)
    again = client.ask(prompt)
    assert (again.host_tokens, again.disk_tokens) == (600, 0)
    check_idle(client)
    client.loop.close()


@pytest.mark.parametrize("components", LAYOUTS, ids=IDS)
def test_the_disk_is_written_from_what_the_host_has(components: tuple[Component, ...]) -> None:
    """Two turns: what the device has is copied from it once, and both tiers restore all of it."""
    disk, prompt = MemoryStore(b"toy", 1 << 30), make_prompt(500)
    client = start(make_host(), disk, components=components)
    first = client.ask(prompt, max_tokens=40)
    turn = [*prompt, *first.tokens, *make_prompt(30, 9)]
    second = client.ask(turn, max_tokens=20)
    check_idle(client)
    client.loop.close()
    host, below = told(client), told(client, "disk")
    assert host["device_bytes"] == host["spilled_bytes"] > 0
    assert below["spilled_bytes"] == host["spilled_bytes"]
    assert below["device_bytes"] == 0
    again = start(None, disk, components=components).ask(turn, max_tokens=20)
    assert (again.tokens, again.disk_tokens) == (second.tokens, len(turn))


@pytest.mark.parametrize("how", ["evicted", "damaged"])
def test_what_the_host_lost_is_written_from_the_device(how: str) -> None:
    """Between the plan and the write, which notices; the host's tree learns of it."""
    disk, prompt = MemoryStore(b"toy", 1 << 30), make_prompt(500)
    host = make_host()
    client, workers = started(host, disk=disk)
    _, below = client.loop.scheduler.traffic.tiers
    reply = client.submit(prompt)
    while below.spills._batch is None:
        workers.advance()
        client.step()
    (key, *_) = [entry.key for entry in below.spills._batch.entries]
    (kept,) = [one for one in host._places.values() if one.entry.key.component is key.component]
    if how == "evicted":
        host.lose(kept, "evicted")
    else:
        kept.area.memory[kept.at] ^= 1
    for _ in range(60):
        workers.advance(9)
        client.step()
    assert reply.finish is not None
    assert told(client, "disk")["device_bytes"] > 0
    assert told(client, "disk")["failed_spills"] == 0
    assert getattr(host.counters(), how) == 1
    assert not any(area.num_readers for area in host._areas), "something lent was not given back"
    client.loop.close()
    assert start(None, disk).ask(prompt).disk_tokens == 500


def started(host: HostStore, **kwargs: Any) -> tuple[Client, Workers]:
    """An engine whose copies are made when the test says so."""
    workers = Workers()
    client = start(host, workers=workers, **kwargs)
    client.loop.scheduler.traffic.wait = lambda seconds: False  # type: ignore[method-assign]
    return client, workers


def ask(client: Client, workers: Workers, prompt: Sequence[int]) -> Reply:
    reply = client.submit(prompt)
    for _ in range(200):
        workers.advance(9)
        client.step()
    assert reply.finish is not None
    return reply


def test_what_a_load_connects_to_may_turn_out_to_be_damaged() -> None:
    """It is dropped, with what was loaded behind it, when the load does not lock it any more."""
    client, workers = started(make_host(), components=(A,))
    cache = client.loop.scheduler.cache
    assert cache is not None
    prompt = make_prompt(500)
    first = ask(client, workers, prompt)
    empty_memory(client)
    ask(client, workers, prompt[:200])
    waiting = client.submit(prompt)
    client.step(2)
    assert client.loop.scheduler.requests[waiting.id].phase == "loading"
    cache.condemn(prompt[:200], A, 0)
    for _ in range(60):
        workers.advance(9)
        client.step()
    assert waiting.tokens == first.tokens
    check_idle(client)


def test_a_load_evicts_nothing_that_its_step_copies(caplog: pytest.LogCaptureFixture) -> None:
    """A prompt on disk evicts the one that was to be copied to the host in the same step."""
    disk, prompt = MemoryStore(b"toy", 1 << 30), make_prompt(600)
    before = start(None, disk, components=(A,))
    first = before.ask(prompt)
    before.loop.close()
    room = 2 * FakeBackend(components=(A,)).row_bytes(700)
    client, workers = started(make_host(), disk=disk, components=(A,), capacity_bytes=room)
    host, _ = client.loop.scheduler.traffic.tiers
    host.spills._not_before = float("inf")
    for family in range(1, 5):
        ask(client, workers, make_prompt(400, family))
    host.spills._not_before = 0.0
    reply = ask(client, workers, prompt)
    assert reply.tokens == first.tokens
    assert reply.disk_tokens > 0
    assert "failed" not in caplog.text
    check_idle(client)


@pytest.mark.parametrize("component", [A, W, S])
def test_damage_costs_a_hit_is_counted_once_and_mended(component: Component) -> None:
    host = make_host()
    client = start(host)
    prompt = make_prompt(500)
    first = client.ask(prompt)
    hurt = [entry.key for entry in host.entries() if entry.key.component is component]
    for key in hurt:
        kept = host._places[key]
        kept.area.memory[kept.at] ^= 1
    for expected in (0, 500):
        empty_memory(client)
        reply = client.ask(prompt)
        assert (reply.tokens, reply.finish) == (first.tokens, "length")
        assert (reply.cached_tokens == 500) == (expected == 500)
    assert told(client)["unreadable_entries"] == host.counters().damaged == 1
    check_idle(client)


def test_a_copy_that_raises_costs_hits_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(HostStore):
        def write(self, entry: Entry, data: Sequence[Bytes]) -> bool:
            raise MemoryError("no room")

    client = start(Failing(1 << 20, plain_memory, BATCH_BYTES))
    prompt = make_prompt(300)
    assert client.ask(prompt).tokens == oracle(prompt)[0]
    empty_memory(client)
    again = client.ask(prompt)
    assert (again.tokens, again.cached_tokens) == (oracle(prompt)[0], 0)
    assert told(client)["failed_spills"] > 0
    assert "writing to the host tier failed" in caplog.text
    check_idle(client)


def test_flushing_empties_all_three() -> None:
    disk, host = MemoryStore(b"toy", 1 << 30), make_host()
    client = start(host, disk)
    client.ask(make_prompt(500))
    answers: list[dict[str, Any]] = []
    client.loop.flush_cache(answers.append)
    (freed,) = answers
    assert freed["freed_host_bytes"] > 0
    assert freed["freed_disk_bytes"] > 0
    client.loop.close()
    assert not disk.entries()


def test_an_engine_that_stops_writes_to_disk_alone() -> None:
    """Nobody will read what is in a memory that goes with the process."""
    disk, host = MemoryStore(b"toy", 1 << 30), make_host()
    client, workers = started(host, disk=disk)
    for flow in client.loop.scheduler.traffic.tiers:
        flow.spills._not_before = float("inf")
    client.ask(make_prompt(500))
    written = host.counters().written
    client.loop.scheduler.traffic.wait = lambda seconds: workers.advance(9) or True  # type: ignore[method-assign]
    client.loop.close()
    assert disk.counters().written > 0
    assert host.counters().written == written == 0
