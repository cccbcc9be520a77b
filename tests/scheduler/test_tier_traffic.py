"""Prompts that come back from disk: after a restart, after an eviction, and when the disk fails."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from builders import ALL, Client, Reply, check_idle, make_loop, make_prompt, oracle
from memory_store import MemoryStore
from pippin.backends.base import StepPlan, StepResult
from pippin.backends.fake import FakeBackend, FakePending
from pippin.cache.entries import Destination, Key
from pippin.scheduler import spills
from pippin.types import Component
from simulator import Workers

A, W, S = Component.ATTENTION, Component.WINDOW, Component.STATE
LAYOUTS = [(A,), (A, S), (A, W), (A, W, S), (S,), (W, S)]
IDS = ["-".join(c.value for c in layout) for layout in LAYOUTS]
FINGERPRINT = b"toy"


def make_store(max_bytes: int = 1 << 30) -> MemoryStore:
    return MemoryStore(FINGERPRINT, max_bytes)


def start(store: MemoryStore, components: tuple[Component, ...] = ALL, **kwargs: object) -> Client:
    """Its model is slow: whatever is on disk is worth a load."""
    client = Client(make_loop(components=components, store=store, **kwargs))
    client.loop.scheduler.pace.compute_seconds = lambda tokens: 1.0 * tokens  # type: ignore[method-assign]
    return client


def say(
    store: MemoryStore, prompt: list[int], components: tuple[Component, ...] = ALL, **kwargs: object
) -> Reply:
    """One engine's life: a prompt, a reply, and an orderly end."""
    client = start(store, components)
    reply = client.ask(prompt, **kwargs)
    check_idle(client)
    client.loop.close()
    return reply


@pytest.mark.parametrize("components", LAYOUTS, ids=IDS)
def test_a_restart_finds_what_was_said(components: tuple[Component, ...]) -> None:
    store, prompt = make_store(), make_prompt(500)
    first = say(store, prompt, components, max_tokens=40)
    same = say(store, prompt, components, max_tokens=40)
    assert same.tokens == first.tokens == oracle(prompt, components=components, max_tokens=40)[0]
    assert same.cached_tokens == 500
    turn = [*prompt, *first.tokens, *make_prompt(30, 9)]
    again = say(store, turn, components)
    assert again.tokens == oracle(turn, components=components)[0]
    assert again.cached_tokens == 540


def test_a_deterministic_engine_writes_the_whole_blocks_of_a_prompt() -> None:
    store, prompt = make_store(), make_prompt(300)
    for expected in (0, 256):
        client = start(store, (A,), deterministic=True)
        assert client.ask(prompt).cached_tokens == expected
        client.loop.close()


def test_a_write_that_fails_while_an_engine_closes_is_discarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    discarded: list[FakePending] = []
    client = start(make_store())
    client.loop.scheduler.traffic.clock = lambda: 0.0  # nothing is due before it closes
    client.ask(make_prompt(500))
    assert client.loop.scheduler.traffic.tiers[0].spills.waits

    def fail(pending: FakePending) -> StepResult:
        raise RuntimeError("the device was lost")

    monkeypatch.setattr(FakePending, "wait", fail)
    monkeypatch.setattr(FakePending, "discard", lambda pending: discarded.append(pending))
    client.loop.close()
    assert len(discarded) == 1


def test_without_a_hidden_vector_the_same_prompt_again_is_restored_before_its_end() -> None:
    store, prompt = make_store(), make_prompt(500)
    for expected in (0, 448):
        client = start(store, backend=FakeBackend(num_slots=8, knows_head=False))
        assert client.ask(prompt).cached_tokens == expected
        client.loop.close()


def started(store: MemoryStore, **kwargs: object) -> tuple[Client, Workers]:
    """An engine whose disk does something when the test says so."""
    workers = Workers()
    client = start(store, workers=workers, **kwargs)
    client.loop.scheduler.traffic.wait = lambda seconds: False  # type: ignore[method-assign]
    return client, workers


def known(store: MemoryStore, length: int = 500, **kwargs: object) -> tuple[list[int], Reply]:
    prompt = make_prompt(length)
    return prompt, say(store, prompt, **kwargs)


def disk_of(client: Client) -> dict[str, object]:
    return client.loop.scheduler.traffic.counters()["disk"]


def test_streams_go_on_while_a_request_waits_for_the_disk() -> None:
    store = make_store()
    prompt, first = known(store)
    client, workers = started(store)
    stream = client.submit(make_prompt(20, 5), max_tokens=60)
    client.step(4)
    waiting = client.submit(prompt)
    client.step(10)
    assert client.loop.scheduler.requests[waiting.id].phase == "loading"
    assert client.loop.counters()["waiting"] == 1
    assert len(stream.tokens) >= 12
    for _ in range(20):
        workers.advance(9)
        client.step()
    assert waiting.tokens == first.tokens
    assert (waiting.cached_tokens, waiting.disk_tokens) == (500, 500)
    while stream.finish is None:
        client.step()
    assert stream.tokens == oracle(stream.prompt, max_tokens=60)[0]


def test_a_load_that_is_late_is_given_up_and_its_disk_not_asked_again_soon() -> None:
    store = make_store()
    prompt, first = known(store)
    client, workers = started(store)
    now = [0.0]
    client.loop.scheduler.traffic.clock = lambda: now[0]
    late = client.submit(prompt)
    client.step(3)
    now[0] = 1e6
    client.step(20)
    assert (late.tokens, late.cached_tokens) == (first.tokens, 0)
    client.loop.scheduler.cache.flush()
    reply = client.submit(prompt)
    client.step(20)
    assert (reply.tokens, reply.cached_tokens) == (first.tokens, 0)
    assert (disk_of(client)["late_loads"], disk_of(client)["declined_loads"]) == (1, 1)
    workers.advance(99)
    client.run()
    check_idle(client)


class DamagedStore(MemoryStore):
    """Notices when it reads them that some entries are damaged, and drops them."""

    damaged: frozenset[Key] = frozenset()

    def read(self, keys: Sequence[Key], into: Sequence[Destination]) -> list[bool]:
        self.forget(self.damaged.intersection(keys))
        return super().read(keys, into)


@pytest.mark.parametrize("component", [A, W, S])
def test_what_cannot_be_read_is_computed_counted_once_and_not_offered_again(
    component: Component,
) -> None:
    store = DamagedStore(FINGERPRINT, 1 << 30)
    prompt, first = known(store)
    client = start(store)
    keys = [entry.key for entry in store.entries() if entry.key.component is component]
    store.damaged = frozenset(keys)
    for _ in range(2):
        reply = client.ask(prompt)
        assert reply.tokens == first.tokens
        client.loop.scheduler.cache.flush()
        store.damaged = frozenset()
    client.loop.close()
    after = disk_of(client)
    assert after["unreadable_entries"] == 1
    assert after["failed_loads"] == 1
    assert say(store, prompt).cached_tokens == 500, "it was not written again"


def test_a_client_that_leaves_while_its_prompt_is_loaded() -> None:
    store = make_store()
    prompt, _ = known(store)
    client, workers = started(store)
    reply = client.submit(prompt)
    client.step(2)
    client.loop.abort(reply.id)
    client.step(2)
    assert reply.finish == "abort"
    workers.advance(99)
    client.run()
    check_idle(client)


def test_two_requests_wait_for_one_load() -> None:
    store = make_store()
    prompt, first = known(store)
    client, workers = started(store)
    replies = [client.submit(prompt) for _ in range(2)]
    client.step(2)
    for _ in range(20):
        workers.advance(9)
        client.step()
    assert [reply.tokens for reply in replies] == [first.tokens] * 2
    assert disk_of(client)["loads"] == 1


@pytest.mark.parametrize("components", [(A,), ALL], ids=["attention", "all"])
def test_a_step_that_fails_under_a_load_costs_its_requests_alone(
    components: tuple[Component, ...],
) -> None:
    class FailingBackend(FakeBackend):
        def launch(self, plan: StepPlan) -> FakePending:
            if plan.load and self.fails:
                self.fails = False
                raise RuntimeError("no room on the device")
            return super().launch(plan)

        fails = True

    store = make_store()
    backend = FakeBackend(components=components, num_slots=8, knows_head=False)
    prompt, client = make_prompt(500), start(store, backend=backend)
    first = client.ask(prompt)
    client.loop.close()
    backend = FailingBackend(components=components, num_slots=8, knows_head=False)
    client = start(store, backend=backend)
    reply = client.ask(prompt)
    assert (reply.tokens, reply.cached_tokens) == (first.tokens, 0)
    assert disk_of(client)["failed_loads"] == 1
    check_idle(client)


def test_each_token_is_written_once() -> None:
    store = make_store()
    prompt, first = known(store, max_tokens=40)
    turn = [*prompt, *first.tokens, *make_prompt(30, 9)]
    for _ in range(3):
        say(store, turn, max_tokens=20)
    counters = store.counters()
    assert counters.written_bytes == counters.kept_bytes == counters.bytes
    tokens = [e.key.num_tokens for e in store.entries() if e.key.component is A]
    assert sum(tokens) == len(turn) + 20


def test_what_memory_has_no_room_for_comes_back_from_disk() -> None:
    store = make_store()
    room = FakeBackend().row_bytes(700) * 3
    client = start(store, capacity_bytes=room)
    prompts = [make_prompt(400, family) for family in range(8)]
    for prompt in prompts:
        client.ask(prompt)
    again = [client.ask(prompt) for prompt in prompts]
    assert [reply.tokens for reply in again] == [oracle(prompt)[0] for prompt in prompts]
    assert all(reply.cached_tokens == 400 for reply in again)
    assert any(reply.disk_tokens for reply in again)
    check_idle(client)


def test_a_sequence_that_the_disk_cannot_hold_is_written_once() -> None:
    store = make_store(max_bytes=1_000)
    client = start(store, batch_bytes=600)
    prompt = make_prompt(500)
    client.ask(prompt)
    client.loop.close()
    assert store.counters().written_bytes < 3 * 500 * 8


def test_what_is_being_written_when_the_tiers_are_flushed_is_not_kept() -> None:
    store = make_store()
    client, workers = started(store)
    reply = client.submit(make_prompt(500))
    (flow,) = client.loop.scheduler.traffic.tiers
    while reply.finish is None:
        client.step()
    client.step(5)
    assert flow.spills.futures
    client.loop.flush_cache()
    for _ in range(20):
        workers.advance()
        client.step()
    assert not store.entries()
    assert disk_of(client)["entries"] == 0
    check_idle(client)


def test_a_load_that_would_take_longer_than_computing_is_not_begun() -> None:
    store = make_store()
    prompt, first = known(store)
    client = start(store)
    client.loop.scheduler.pace.compute_seconds = lambda tokens: 1e-9
    reply = client.ask(prompt)
    assert (reply.tokens, reply.cached_tokens) == (first.tokens, 0)
    assert disk_of(client)["declined_loads"] == 1


def test_sequences_that_wait_to_be_written_are_bounded_in_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spills, "MAX_WAITING_BYTES", 4_000)
    client, _ = started(make_store())
    (disk,) = client.loop.scheduler.traffic.tiers
    for number in range(20):
        disk.spills.note(f"r{number % 15}", np.zeros(100 + number, np.int32))
        held = [tokens.nbytes for tokens, _ in disk.spills._waiting.values()]
        assert sum(held) == disk.spills._waiting_bytes <= 4_000
    assert f"r{19 % 15}" in disk.spills._waiting, "the newest was forgotten"
    disk.spills.note("alone", np.zeros(2_000, np.int32))
    assert list(disk.spills._waiting) == ["alone"]
    disk.spills.forget()
    assert disk.spills._waiting_bytes == 0
