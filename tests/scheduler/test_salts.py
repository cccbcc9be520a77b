"""Requests of different salts share nothing: not in memory, not on the way there, not on disk."""

from __future__ import annotations

import pytest

from builders import Client, check_idle, make_client, make_loop, make_prompt, oracle
from memory_store import MemoryStore
from simulator import Workers

SALTS = [b"", b"mine", b"yours"]


@pytest.mark.parametrize("salt", SALTS)
def test_a_prompt_is_found_under_its_own_salt_alone(salt: bytes) -> None:
    client, prompt = make_client(), make_prompt(300)
    reply = client.ask(prompt, salt=salt)
    for other in SALTS:
        again = client.ask(prompt, salt=other)
        assert again.cached_tokens == (300 if other == salt else 0)
        assert again.tokens == reply.tokens == oracle(prompt)[0]
    check_idle(client)


def test_the_next_turn_continues_the_reply_of_its_own_salt() -> None:
    client, prompt = make_client(), make_prompt(300)
    reply = client.ask(prompt, salt=b"mine", max_tokens=40)
    turn = [*prompt, *reply.tokens, *make_prompt(30, 9)]
    assert client.ask(turn, salt=b"yours").cached_tokens == 0
    assert client.ask(turn, salt=b"mine").cached_tokens == 340


@pytest.mark.parametrize("salt", [b"mine", b"yours"])
def test_a_request_waits_for_an_in_flight_prefix_of_its_own_salt_alone(salt: bytes) -> None:
    client, prompt = make_client(chunk=2048), make_prompt(600)
    client.submit(prompt, salt=b"mine")
    second = client.submit([*prompt, 1, 2, 3], salt=salt)
    client.step()
    assert client.loop.scheduler.requests[second.id].running == (salt == b"yours")
    client.run()
    assert second.cached_tokens == (600 if salt == b"mine" else 0)
    check_idle(client)


def start(store: MemoryStore, **kwargs: object) -> Client:
    """Its model is slow: whatever is on disk is worth a load."""
    client = Client(make_loop(store=store, **kwargs))
    client.loop.scheduler.pace.compute_seconds = lambda tokens: 1.0 * tokens  # type: ignore[method-assign]
    return client


def test_a_restart_finds_what_was_written_under_the_same_salt_alone() -> None:
    store, prompt = MemoryStore(b"toy", 1 << 30), make_prompt(500)
    for salt in (b"mine", b"yours", b""):
        client = start(store)
        assert client.ask(prompt, salt=salt).cached_tokens == 0
        client.loop.close()
    for salt in (b"mine", b"yours", b""):
        client = start(store)
        again = client.ask(prompt, salt=salt)
        assert (again.cached_tokens, again.disk_tokens) == (500, 500)
        client.loop.close()


def test_a_load_serves_requests_of_its_own_salt_alone() -> None:
    store, prompt = MemoryStore(b"toy", 1 << 30), make_prompt(500)
    for salt in (b"mine", b"yours"):
        client = start(store)
        client.ask(prompt, salt=salt)
        client.loop.close()
    workers = Workers()
    client = start(store, workers=workers)
    replies = [client.submit(prompt, salt=salt) for salt in (b"mine", b"mine", b"yours", b"")]
    client.step()
    assert len(client.loop.scheduler.traffic.loading) == 3
    for _ in range(200):
        workers.advance()
        client.step()
    client.run()
    assert [reply.disk_tokens for reply in replies] == [500, 500, 500, 0]
    assert client.loop.scheduler.traffic.counters()["disk"]["loads"] == 2
    check_idle(client)


def test_without_a_salt_entries_have_the_names_that_they_always_had() -> None:
    store, prompt = MemoryStore(b"toy", 1 << 30), make_prompt(500)
    client = start(store)
    client.ask(prompt)
    client.loop.close()
    (parent,) = {entry.parent for entry in store.entries() if entry.start == 0}
    assert parent.hex() == PARENT_OF_TOY


PARENT_OF_TOY = "9dd67cd65c5d20bfd0aceb420bba00872a1391cd3770aa9b340de4b46331fafd"
