"""The store of responses, against one that keeps everything and counts it again."""

from __future__ import annotations

import random

import msgspec
import pytest

from pippin.api.dialects.responses.store import (
    PreviousResponseNotFound,
    ResponseNotFound,
    ResponseStore,
    Turn,
)

ME, YOU = b"me", b"you"


def item(id: str, text: str = "") -> dict[str, str]:
    return {"id": id, "text": text}


def put(
    store: ResponseStore,
    id: str,
    previous: Turn | None = None,
    *,
    text: str = "",
    owner: bytes = ME,
) -> bool:
    turn = Turn.of(owner, [item(f"in-{id}", text)], [item(f"out-{id}")], previous)
    return store.put({"id": id, "output": msgspec.json.decode(turn.output)}, turn)


def test_a_response_is_found_with_all_that_was_said_before_it() -> None:
    store = ResponseStore(10, 10_000)
    put(store, "a")
    put(store, "b", store.previous("a", ME))
    stored = store.get("b", ME)
    assert stored.response() == {"id": "b", "output": [item("out-b")]}
    assert [each["id"] for each in stored.turn.items()] == ["in-a", "out-a", "in-b", "out-b"]
    assert [each["id"] for each in stored.turn.input_items()] == ["in-a", "out-a", "in-b"]


def test_what_was_not_asked_for_longest_goes_first_and_what_was_built_on_it_stays_whole() -> None:
    store = ResponseStore(2, 10_000)
    put(store, "a")
    put(store, "b", store.previous("a", ME))
    store.get("a", ME)
    put(store, "c", store.previous("a", ME))
    with pytest.raises(ResponseNotFound):
        store.get("b", ME)
    store.delete("a", ME)
    assert [each["id"] for each in store.get("c", ME).turn.items()][:2] == ["in-a", "out-a"]
    assert store.items(["out-a", "out-b"], ME) == {"out-a": item("out-a")}


def test_another_key_finds_nothing() -> None:
    store = ResponseStore(10, 10_000)
    put(store, "a")
    for ask in (store.get, store.delete):
        with pytest.raises(ResponseNotFound, match="Response with id 'a' not found"):
            ask("a", YOU)
    with pytest.raises(PreviousResponseNotFound, match="Previous response with id 'a' not found"):
        store.previous("a", YOU)
    assert store.items(["in-a"], YOU) == {}
    assert store.get("a", ME)


def test_what_is_too_large_alone_is_not_kept_and_drops_nobody() -> None:
    store = ResponseStore(10, 500)
    assert put(store, "a")
    assert not put(store, "b", store.previous("a", ME), text="x" * 480)
    assert len(store) == 1
    assert store.get("a", ME)


def test_a_chain_counts_whole_also_if_its_beginning_was_dropped_meanwhile() -> None:
    store = ResponseStore(1, 10_000)
    put(store, "a", text="x" * 100)
    turn = store.previous("a", ME)
    put(store, "b")  # while a request that goes on from "a" is running
    before = store.nbytes
    put(store, "c", turn)
    assert store.nbytes > before + 100
    assert len(store.get("c", ME).turn.items()) == 4


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold_and_bytes_add_up_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    store = ResponseStore(rng.randint(1, 8), rng.randint(200, 2000))
    for number in range(300):
        known = list(store._responses)
        match rng.choice(["put", "put", "get", "delete"]):
            case "put":
                goes_on = known and rng.random() < 0.7
                previous = store.previous(rng.choice(known), ME) if goes_on else None
                put(store, str(number), previous, text="x" * rng.randint(0, 300))
            case "get" if known:
                store.get(rng.choice(known), ME)
            case "delete" if known:
                store.delete(rng.choice(known), ME)
        kept = {turn for stored in store._responses.values() for turn in stored.turn.chain()}
        told = sum(len(stored.told) for stored in store._responses.values())
        assert store.nbytes == told + sum(turn.nbytes for turn in kept) <= store.max_bytes
        assert len(store) <= store.max_responses
        assert set(store._turns.values()) == kept
