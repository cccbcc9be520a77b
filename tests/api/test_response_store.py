"""The store of responses, against one that keeps everything and counts it again."""

from __future__ import annotations

import random

import msgspec
import pytest

from cases import cases
from pippin.api.response_store import (
    PreviousResponseNotFound,
    ResponseNotFound,
    ResponseStore,
    ResponseStores,
    StoredTurn,
)

ME, YOU = b"me", b"you"  # owners


def item(id: str, text: str = "") -> dict[str, str]:
    return {"id": id, "text": text}


def put(
    store: ResponseStore,
    id: str,
    previous: StoredTurn | None = None,
    *,
    text: str = "",
) -> bool:
    turn = StoredTurn.of([item(f"in-{id}", text)], [item(f"out-{id}")], previous)
    return store.put({"id": id, "output": msgspec.json.decode(turn.output)}, turn)


def test_a_response_is_found_with_all_that_was_said_before_it() -> None:
    store = ResponseStore(10, 10_000)
    put(store, "a")
    put(store, "b", store.previous("a"))
    stored = store.get("b")
    assert stored.response() == {"id": "b", "output": [item("out-b")]}
    assert [each["id"] for each in stored.turn.items()] == ["in-a", "out-a", "in-b", "out-b"]
    assert [each["id"] for each in stored.turn.input_items()] == ["in-a", "out-a", "in-b"]


def test_what_was_not_asked_for_longest_goes_first_and_what_was_built_on_it_stays_whole() -> None:
    store = ResponseStore(2, 10_000)
    put(store, "a")
    put(store, "b", store.previous("a"))
    store.get("a")
    put(store, "c", store.previous("a"))
    with pytest.raises(ResponseNotFound):
        store.get("b")
    store.delete("a")
    assert [each["id"] for each in store.get("c").turn.items()][:2] == ["in-a", "out-a"]
    assert store.items(["out-a", "out-b"]) == {"out-a": item("out-a")}


def test_another_key_finds_nothing() -> None:
    stores = ResponseStores(10, 10_000, num_owners=2)
    mine, yours = stores.of(ME), stores.of(YOU)
    put(mine, "a")
    for ask in (yours.get, yours.delete):
        with pytest.raises(ResponseNotFound, match="Response with id 'a' not found"):
            ask("a")
    with pytest.raises(PreviousResponseNotFound, match="Previous response with id 'a' not found"):
        yours.previous("a")
    assert yours.items(["in-a"]) == {}
    assert stores.of(ME).get("a")


def test_another_key_cannot_take_an_items_place_nor_its_room() -> None:
    stores = ResponseStores(6, 2_000, num_owners=2)
    mine, yours = stores.of(ME), stores.of(YOU)
    put(mine, "a", text="mine")
    put(yours, "a", text="yours")
    for number in range(20):
        put(yours, str(number), text="x" * 100)
    assert mine.items(["in-a"]) == {"in-a": item("in-a", "mine")}
    assert len(yours) == 3
    assert len(mine) == 1
    assert not put(yours, "large", text="x" * 1_000)
    assert put(mine, "b", text="x" * 500)


@pytest.mark.parametrize(("total", "each"), [(0, 0), (1, 1), (2, 1), (7, 2), (1024, 341)])
def test_each_owner_has_an_equal_part_and_room_for_one_response_at_least(
    total: int, each: int
) -> None:
    store = ResponseStores(total, 9_000, num_owners=3).of(ME)
    assert (store.max_responses, store.max_bytes) == (each, 3_000)
    assert store.enabled == (total > 0)


def test_what_is_too_large_alone_is_not_kept_and_drops_nobody() -> None:
    store = ResponseStore(10, 500)
    assert put(store, "a")
    assert not put(store, "b", store.previous("a"), text="x" * 480)
    assert len(store) == 1
    assert store.get("a")


def test_a_chain_counts_whole_also_if_its_beginning_was_dropped_meanwhile() -> None:
    store = ResponseStore(1, 10_000)
    put(store, "a", text="x" * 100)
    turn = store.previous("a")
    put(store, "b")  # while a request that goes on from "a" is running
    before = store.nbytes
    put(store, "c", turn)
    assert store.nbytes > before + 100
    assert len(store.get("c").turn.items()) == 4


@cases("seed", range(20))
def test_bounds_hold_and_bytes_add_up_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    store = ResponseStore(rng.randint(1, 8), rng.randint(200, 2000))
    for number in range(300):
        known = list(store._responses)
        match rng.choice(["put", "put", "get", "delete"]):
            case "put":
                goes_on = known and rng.random() < 0.7
                previous = store.previous(rng.choice(known)) if goes_on else None
                put(store, str(number), previous, text="x" * rng.randint(0, 300))
            case "get" if known:
                store.get(rng.choice(known))
            case "delete" if known:
                store.delete(rng.choice(known))
        kept = {turn for stored in store._responses.values() for turn in stored.turn.chain()}
        told = sum(len(stored.rest) for stored in store._responses.values())
        assert store.nbytes == told + sum(turn.nbytes for turn in kept) <= store.max_bytes
        assert len(store) <= store.max_responses
        assert set(store._turns.values()) == kept
